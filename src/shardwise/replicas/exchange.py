"""Rounds, in which replicas exchange differences: of a fixed process group, or of a manager."""

from abc import ABC, abstractmethod
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.device import ThreadStream
from shardwise.comm.groups import backends_of
from shardwise.replicas.group import ReplicaGroup

__all__ = ["NONE", "Exchange", "GroupExchange", "ManagerExchange"]

NONE = -1  # no fragment


class Exchange(ABC):
    """Exchanges differences with the ranks that hold the same shard in other replicas.

    A round is `begin`, `send` and `receive`. It may last for several steps of training.

    Attributes:
        num_replicas: number of replicas in the last round.
        counts: whether this replica's difference is averaged in this round.
    """

    num_replicas = 1
    counts = True
    is_elastic = False  # whether replicas may leave and join
    rounds, history = 0, 0  # what `resume` needs to continue after a checkpoint

    def resume(self, rounds: int, history: int) -> None:  # noqa: B027
        """Continue after the rounds of a checkpoint."""

    def begin(self, fragment: int, step: int, checksum: int) -> tuple[int, int]:  # noqa: ARG002
        """Begin a round for ``fragment``, which is due here after ``step``, or for `NONE`.

        Args:
            fragment: number of the fragment.
            step: local step.
            checksum: of the values that the difference refers to.

        Returns:
            The fragment that is due in the other replicas, or `NONE`, and their step.
        """
        return fragment, step

    @abstractmethod
    def send(self, fragment: int, packed: Tensor) -> None:
        """Send a difference [n], uint8, without waiting."""

    @abstractmethod
    def receive(self, fragment: int) -> list[Tensor] | None:
        """End the round: the differences to average, or None if it has to be repeated."""


class GroupExchange(Exchange):
    """Exchanges differences over a process group, all of whose ranks take part in every round."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.num_replicas = dist.get_world_size(group)
        types = list(backends_of(group))
        self._device = torch.device("cpu" if "cpu" in types else types[0])
        self._pending: dict[int, tuple[dist.Work, list[Tensor]]] = {}  # by fragment

    def send(self, fragment: int, packed: Tensor) -> None:
        own = packed.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(self.num_replicas)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        self._pending[fragment] = work, gathered

    def receive(self, fragment: int) -> list[Tensor] | None:
        work, gathered = self._pending.pop(fragment)
        work.wait()
        return gathered


class ManagerExchange(Exchange):
    """Exchanges differences with the replicas of a manager; one round at a time."""

    is_elastic = True

    def __init__(self, group: ReplicaGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._stream = ThreadStream("shardwise-replicas")
        self._gather_rows = self._stream.submit(lambda: None)
        self._rows: list[Tensor] | None = None

    def resume(self, rounds: int, history: int) -> None:
        if self.group.step < rounds:
            self.group.manager.load_state_dict({"step": rounds, "batches_committed": rounds})
            self.group.history = history

    def begin(self, fragment: int, step: int, checksum: int) -> tuple[int, int]:
        self.counts = fragment != NONE
        self.group.begin()  # the replica may heal, and `counts` becomes False
        self.group.takes_part = self.counts
        table = self.group.meet(self._device, extra=(checksum, fragment, step))
        if table is None:
            return fragment, step
        self.num_replicas = len(table)
        rows = [row for row in table.tolist() if row[0]]
        *_, due, at = rows[0] if rows else (NONE, step)
        return int(due), int(at)

    def send(self, fragment: int, packed: Tensor) -> None:  # noqa: ARG002
        self._rows = None
        self._gather_rows = self._stream.submit(partial(self._gather, packed.to(self._device)))

    def _gather(self, packed: Tensor) -> None:
        self._rows = self.group.all_gather(packed)

    def receive(self, fragment: int) -> list[Tensor] | None:
        self._gather_rows.wait()
        if self._gather_rows.error is not None:
            raise self._gather_rows.error
        counted = self.group.counted()
        if not self.group.commit(self._device):
            return None
        self.rounds, self.history = self.group.step, self.group.history
        if fragment == NONE:
            return []
        assert self._rows is not None
        return [row for row, counts in zip(self._rows, counted, strict=True) if counts]
