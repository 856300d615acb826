"""The exchange of differences between replicas: its interface, and one over a process group."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups import backends_of

__all__ = ["Decision", "Exchange", "GroupExchange", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The rounds that have been applied to a fragment."""

    round: int = 0  # number of rounds
    digest: str = "start"  # of all decisions; equal digests mean equal bits
    step: int = 0  # the local step after which the differences of the last round were taken


@dataclass(frozen=True, eq=False)
class Decision:
    """The outcome of one round of a fragment, the same in all replicas."""

    packed: Sequence[Tensor]  # the differences to average, uint8, in the order of replicas
    progress: Progress  # after this round
    includes_own: bool = True  # whether this replica's difference is among them
    ticket: int = 0  # if not 0, this replica has to send its state under this number


class Exchange(ABC):
    """Exchanges differences with the ranks that hold the same shard in other replicas.

    The rounds of a fragment are decided one after the other. With an elastic exchange, replicas may
    leave and join, and the ranks of a replica have to agree on what they have received. The methods
    that only elastic exchanges need do nothing by default.
    """

    is_elastic = False

    def __init__(self) -> None:
        self.sent_bytes = 0  # bytes of differences
        self.state_bytes = 0  # bytes of states sent to other replicas
        self.step = 0  # this replica's step, which other replicas receive
        self.group_step = 0  # the last step after which any replica has synchronized
        self.is_member = True  # False while it waits for other replicas or for a state
        self.connection_error = ""  # why there is no connection
        self._progress: list[Progress] = []  # of each fragment

    @abstractmethod
    def message_bytes(self, packed_bytes: int) -> int:
        """The number of bytes that this rank sends for a difference of ``packed_bytes``."""

    def connect(self, progress: Sequence[Progress], checksum: str) -> None:  # noqa: ARG002
        """Begin; ``checksum`` is that of the shared parameters after the rounds in ``progress``."""
        self._progress = list(progress)

    @abstractmethod
    def send(self, fragment: int, packed: Tensor, checksum: str) -> None:
        """Send a difference for the next round of a fragment, without waiting.

        Args:
            fragment: the number of the fragment.
            packed: the difference, uint8.
            checksum: of the shared parameters that the difference refers to.
        """

    @abstractmethod
    def decided(self, fragment: int, seconds: float) -> list[Decision]:
        """The decisions after the last applied one, in order.

        Waits up to ``seconds`` for the first one.
        """

    def applied(self, fragment: int, decision: Decision) -> None:
        """Record that ``decision`` was applied."""
        self._progress[fragment] = decision.progress

    # -- elastic exchanges ------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:  # noqa: B027
        """Wait up to ``seconds`` until this replica is a member or has received a state."""

    @property
    def ticket(self) -> int:
        """The number of the state received from another replica, or 0."""
        return 0

    def take_state(self, ticket: int) -> bytes:
        """Return the received state with this number."""
        raise NotImplementedError

    def give_state(self, ticket: int, state: bytes) -> None:  # noqa: B027
        """Send this rank's state in the background."""

    def ready(self, progress: Sequence[Progress]) -> None:  # noqa: B027
        """Become a member after this rank has loaded a state."""

    def close(self) -> None:  # noqa: B027
        """Leave the other replicas."""


class GroupExchange(Exchange):
    """Exchanges differences over a process group, all of whose ranks take part in every round."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._size = dist.get_world_size(group)
        types = list(backends_of(group))
        self._device = torch.device("cpu" if "cpu" in types else types[0])
        self._pending: dict[int, tuple[dist.Work, list[Tensor]]] = {}  # by fragment

    def message_bytes(self, packed_bytes: int) -> int:
        return packed_bytes * (self._size - 1)

    def send(self, fragment: int, packed: Tensor, checksum: str) -> None:  # noqa: ARG002
        own = packed.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        self._pending[fragment] = work, gathered
        self.sent_bytes += self.message_bytes(own.nbytes)

    def decided(self, fragment: int, seconds: float) -> list[Decision]:  # noqa: ARG002
        if fragment not in self._pending:
            return []
        work, gathered = self._pending.pop(fragment)
        work.wait()
        round_ = self._progress[fragment].round + 1
        return [Decision(gathered, Progress(round_, step=self.step))]
