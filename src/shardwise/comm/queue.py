"""A queue of collectives: what it does, how far it has come, how it continues after an error."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.comm.api import CollectiveId, RankGroup, Reduction, SharedBuffer, Step, Work
from shardwise.comm.device import CommStream

__all__ = ["Collectives", "QueueState"]


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


class Collectives(ABC):
    """A queue of collectives, which run in the order of their launch on ``stream``."""

    stream: CommStream
    is_monitored = True  # `state` is kept, so that ranks can compare it during a wait
    is_timed = True  # whether the times of works are needed
    # The number of exchanges since the last recovery, and the bytes that this rank sent in them;
    # zeros if not counted.
    sent = (0, 0)

    def __init__(self, world: RankGroup, name: str) -> None:
        self._ranks, self._own_rank = world.ranks, world.own_rank
        # A weak reference, since this object lives as long as the group.
        self._parent = None if world.parent is None else weakref.ref(world.parent)
        self.name = name
        self._lock = threading.Lock()  # for what follows
        self._epoch = 0  # number of restarts
        self._is_stopped = False
        # Of issued collectives, by the digest of their group: one replica may gather alone.
        self._numbers: Counter[str] = Counter()
        self._ended: deque[CollectiveId] = deque(maxlen=16)

    @property
    def world(self) -> RankGroup:
        """All ranks that may take part in a collective."""
        parent = None if self._parent is None else self._parent()
        return RankGroup(self._ranks, self._own_rank, parent)

    @abstractmethod
    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,
        fill: Callable[[], None] | None = None,
        shared: SharedBuffer | None = None,
    ) -> Work:
        """All-gather ``flat`` in place.

        Args:
            flat: [ranks * S], of which this rank contributes its slot [S].
            group: the ranks that take part.
            label: name in the ledger.
            fill: writes this rank's slot just before it is sent; None if it is written already.
            shared: the buffer of ``flat``; passed by all ranks of the group or by none.
        """

    @abstractmethod
    def reduce(self, reduction: Reduction, label: str) -> Work:
        """Run the stages of ``reduction`` one after the other."""

    @abstractmethod
    def all_reduce_max(self, values: Tensor, group: RankGroup, label: str) -> Work:
        """Replace ``values`` [n] with the maximum over the ranks of ``group``."""

    @abstractmethod
    def relay(self, steps: Sequence[Step], label: str) -> Work:
        """Run ``steps`` in order; each uses the results of those before."""

    @abstractmethod
    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        """Send the first tensor [n] of each pair to its rank, and receive the second [m] from it.

        All ranks of `world` call this, including those that have nothing to send or receive.
        """

    @abstractmethod
    def state(self) -> QueueState:
        """Return how far this rank has come."""

    @abstractmethod
    def stop(self) -> None:
        """End the collectives, some of which would never end; begin no more."""

    def restart(self, epoch: int) -> None:
        """Continue after `stop`, with numbers from 1 on. All ranks call this together.

        ``epoch`` is the number of restarts; a call that raised may be repeated.
        """
        with self._lock:
            self._ended.clear()
            self._numbers.clear()
            self._epoch = epoch
            self._is_stopped = False

    @property
    def _issued(self) -> int:
        return sum(tuple(self._numbers.values()))  # a copy: another thread may add a group

    def _next_id(self, label: str, group: RankGroup, num_bytes: int) -> CollectiveId:
        """Number a collective in which this rank sends ``num_bytes`` to each other rank."""
        self._numbers[group.digest] += 1
        number = self._numbers[group.digest]
        return CollectiveId(number, label, num_bytes, group.ranks, group.digest)
