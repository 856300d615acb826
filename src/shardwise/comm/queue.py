"""A queue of collectives: what it does, how far it has come, how it continues after an error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shardwise.comm.api import CollectiveId, RankGroup, Reduction, Step, Work
from shardwise.comm.device import CommStream

__all__ = ["Collectives", "QueueState", "are_below"]


class Collectives(Protocol):
    """A queue of collectives, which run in the order of their launch."""

    name: str
    is_timed: bool  # whether the times of works are needed

    @property
    def stream(self) -> CommStream:
        """Where the collectives run."""

    @property
    def world(self) -> RankGroup:
        """All ranks that may take part in a collective."""

    @property
    def is_monitored(self) -> bool:
        """Whether `state` is kept, so that ranks can compare it during a wait."""

    @property
    def sent(self) -> tuple[int, int]:
        """The number of exchanges so far and the bytes that this rank sent in them; or zeros."""

    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,
        fill: Callable[[], None] | None = None,
        shared: object = None,
    ) -> Work:
        """All-gather ``flat`` in place.

        Args:
            flat: [ranks * S], of which this rank contributes its slot [S].
            group: the ranks that take part.
            label: name in the ledger.
            fill: writes this rank's slot just before it is sent; None if it is written already.
            shared: from `SharedMemory.range_at`; passed by all ranks of the group or by none.
        """

    def reduce(self, reduction: Reduction, label: str) -> Work:
        """Run the stages of ``reduction`` one after the other."""

    def all_reduce_max(self, values: Tensor, group: RankGroup, label: str) -> Work:
        """Replace ``values`` [n] with the maximum over the ranks of ``group``."""

    def relay(self, steps: Sequence[Step], label: str) -> Work:
        """Run ``steps`` in order; each uses the results of those before."""

    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        """Send the first tensor [n] of each pair to its rank, and receive the second [m] from it.

        All ranks of `world` call this, including those that have nothing to send or receive.
        """

    def state(self) -> "QueueState":
        """Return how far this rank has come."""

    def stop(self) -> None:
        """End the collectives, some of which would never end; begin no more."""

    def restart(self) -> None:
        """Continue after `stop`, with numbers from 1 on. All ranks call this together."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The progress of one rank in one queue of collectives."""

    issued: int  # number of collectives
    begun: int  # how many of these
    running: CollectiveId | None
    ended: tuple[int, ...]  # tags of the last ones
    last: str = ""  # label of the last one that ended

    @staticmethod
    def of(
        issued: int, begun: int, running: CollectiveId | None, ended: Sequence[CollectiveId]
    ) -> "QueueState":
        """Return the state of a queue whose last collectives are ``ended``."""
        last = ended[-1].label if ended else ""
        return QueueState(issued, begun, running, tuple(one.tag for one in ended), last)

    @property
    def is_about_to_begin(self) -> bool:
        return self.running is None and self.begun < self.issued

    def has_begun(self, collective: CollectiveId) -> bool:
        return collective.tag in self.ended or (
            self.running is not None and self.running.tag == collective.tag
        )


def are_below(num_ranks: int, *groups: tuple[int, ...]) -> bool:
    """Whether all numbers of the ``groups`` are ranks of a job of ``num_ranks``."""
    return all(min(group) >= 0 and max(group) < num_ranks for group in groups if group)
