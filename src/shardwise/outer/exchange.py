"""How differences get from replica to replica: what an exchange is, and one by a process group."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.transport.process_group import backends_of

__all__ = ["Decision", "Exchange", "GroupExchange", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fragment is."""

    round: int = 0  # rounds so far
    digest: str = "start"  # of all decisions so far: replicas with the same one have the same bits
    step: int = 0  # the local step after which the differences of the last one were taken


@dataclass(frozen=True, eq=False)
class Decision:
    """The outcome of one round of a fragment, with the same content in all replicas."""

    packed: Sequence[Tensor]  # differences that count, in the order of replicas; uint8
    progress: Progress  # after it
    counts_own: bool = True  # whether the difference of this replica is one of them
    ticket: int = 0  # of the copy of its state that this replica has to give; 0: none


class Exchange(ABC):
    """The same shard in all replicas. Rounds of a fragment are decided one after the other.

    Methods that only matter where replicas come and go do nothing by default.
    """

    # Whether replicas come and go, so that the ranks of a replica have to agree on what they know.
    is_elastic = False

    def __init__(self) -> None:
        self.sent_bytes = 0  # of differences
        self.state_bytes = 0  # of states that were given
        self.step = 0  # of the replica, which others are told
        self.group_step = 0  # the last step that any replica has synchronized after
        self.is_member = True  # or else waits for others, or for a state
        self.trouble = ""  # why it has no connection

    @abstractmethod
    def message_bytes(self, packed_bytes: int) -> int:
        """The bytes that this rank sends for a difference of that size."""

    @abstractmethod
    def send(self, fragment: int, packed: Tensor, values: str) -> None:
        """Send the difference of the round that is next; returns at once.

        Args:
            fragment: its number.
            packed: the difference, uint8.
            values: a checksum of the shared parameters that it was taken from.
        """

    @abstractmethod
    def decided(self, fragment: int, seconds: float) -> list[Decision]:
        """What follows on what was applied, in order, with a wait of so long for the first one."""

    def applied(self, fragment: int, decision: Decision) -> None:  # noqa: B027
        """The decision was applied."""

    # -- where replicas come and go ---------------------------------------------------------------

    def connect(self, progress: Sequence[Progress], values: str) -> None:  # noqa: B027
        """Begin, with a checksum of the shared parameters after these rounds."""

    def wait(self, seconds: float) -> None:  # noqa: B027
        """Wait for so long at most until this rank is a member or has a state to take."""

    @property
    def ticket(self) -> int:
        """The number of the state that has come from another replica; 0: none."""
        return 0

    def take_state(self, ticket: int) -> bytes:
        """The state with this number."""
        raise NotImplementedError

    def give_state(self, ticket: int, state: bytes) -> None:  # noqa: B027
        """Send this rank's state in the background."""

    def ready(self, progress: Sequence[Progress]) -> None:  # noqa: B027
        """A state was taken."""

    def close(self) -> None:  # noqa: B027
        """Leave."""


class GroupExchange(Exchange):
    """Between the ranks of a process group that hold the same shard, all of which take part."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._size = dist.get_world_size(group)
        self._device = _device_of(group)
        self._pending: dict[int, tuple[dist.Work, list[Tensor]]] = {}
        self._rounds: dict[int, int] = {}

    def message_bytes(self, packed_bytes: int) -> int:
        return packed_bytes * (self._size - 1)

    def connect(self, progress: Sequence[Progress], values: str) -> None:  # noqa: ARG002
        self._rounds = {fragment: one.round for fragment, one in enumerate(progress)}

    def send(self, fragment: int, packed: Tensor, values: str) -> None:  # noqa: ARG002
        own = packed.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        self._pending[fragment] = work, gathered
        self.sent_bytes += own.nbytes * (self._size - 1)

    def decided(self, fragment: int, seconds: float) -> list[Decision]:  # noqa: ARG002
        if fragment not in self._pending:
            return []
        work, gathered = self._pending.pop(fragment)
        work.wait()
        self._rounds[fragment] = self._rounds.get(fragment, 0) + 1
        return [Decision(gathered, Progress(self._rounds[fragment], step=self.step))]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    types = list(backends_of(group))
    return torch.device("cpu" if "cpu" in types else types[0])
