"""Collects the parts of matrices on their owners, and sends the updates to all ranks.

There is no all-gather: each rank sends its part of a matrix to the owner only, and the owner sends
each rank the part of the update that it stores. Where replicas hold the same parts, those of the
owner's own replica are used. The parts of several matrices form one message. While an owner works
on one batch of matrices, the next batch arrives and the updates of the previous one are sent.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.api import Work
from shardwise.comm.communicator import Collectives, Communicator, communicator
from shardwise.optim.matrices import Matrices
from shardwise.optim.ownership import Flow, Job, OwnedJobs, between
from shardwise.plan.axes import AxisBytes
from shardwise.runtime.ledger import count_sent
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = ["MatrixExchange", "Member", "Steps"]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that is updated as `matrices`."""

    parameter: Tensor
    matrices: Matrices
    group: Mapping[str, Any]  # the param_group that contains it
    cost: int  # floating-point operations of the owner
    owner: int | None = None  # the owner that has its states already

    @property
    def sharding(self) -> Sharding | None:
        return sharding_of(self.parameter)

    def part(self, whole: Tensor, shard: int) -> Tensor:
        return whole if self.sharding is None else self.sharding.part_of(whole, shard)

    @cached_property
    def job(self) -> Job:
        whole = torch.empty(self.matrices.shape, device="meta")
        num_shards = 1 if self.sharding is None else self.sharding.mesh.size
        parts = (self.part(whole, shard).numel() for shard in range(num_shards))
        return Job(self.cost, tuple(parts), self.owner)

    @property
    def label(self) -> str:
        """A name that is the same on all ranks."""
        return self.matrices.name if self.sharding is None else self.sharding.label


@dataclass(frozen=True)
class Steps:
    """The steps of an update."""

    contribute: Callable[[Member], Tensor]  # what this rank sends: a tensor like its shard
    work: Callable[[Member, Tensor], Tensor]  # on the owner: all contributions -> whole update
    apply: Callable[[Member, Tensor], None]  # takes this rank's part of the update


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages in flight between this rank and others; keeps their memory alive."""

    work: Work | None
    sent: dict[int, Tensor]  # by destination
    received: dict[int, Tensor]  # by source
    parts: dict[tuple[int, int], Tensor]  # what is received, by member and source

    def wait(self, comm: Communicator) -> None:
        if self.work is not None:
            comm.wait(self.work)


class MatrixExchange:
    """The parameters of one mesh and dtype, and their owners, which work on ``device``.

    ``members`` are the same on all ranks, in the same order.
    """

    def __init__(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, name: str
    ) -> None:
        self.members = tuple(members)
        self.dtype, self.device, self._name = dtype, device, name
        sharding = members[0].sharding
        self.mesh = mesh = None if sharding is None else sharding.mesh
        self.rank = 0 if mesh is None else mesh.group_rank
        replicas = ((0,),) if mesh is None else mesh.replicas
        num_rows = 1 if mesh is None else mesh.size // mesh.row.size
        jobs = tuple(member.job for member in self.members)
        self.jobs = OwnedJobs(jobs, replicas, num_rows, dtype.itemsize)
        self.owners = self.jobs.owners
        # The mesh of states that are whole on their owners.
        self.flat_mesh = None if mesh is None else mesh.with_one_shard_per_rank()
        self._batches: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    @property
    def trainable(self) -> list[int]:
        """The indices of members that are not frozen."""
        return [i for i, member in enumerate(self.members) if member.parameter.requires_grad]

    def sent_bytes(self, indices: Sequence[int], rank: int | None = None) -> AxisBytes:
        """The bytes that ``rank`` (default: this rank) sends to step the members at ``indices``."""
        return self.jobs.sent_bytes(self._batched(indices), self.rank if rank is None else rank)

    @contextlib.contextmanager
    def step(self, indices: Sequence[int], steps: Steps) -> Iterator[None]:
        """Update the members at ``indices``; the first parts move during the ``with`` block."""
        comm = None if self.mesh is None else communicator(self.mesh.world, self.device)
        if not indices:
            yield
            return
        if comm is None or comm.num_ranks == 1:
            yield
            self._step_alone(indices, steps)
            return
        comm.watch.recover()
        try:
            yield from self._step_with_others(self._batched(indices), steps, comm)
        except BaseException as error:
            comm.watch.abort(error)
            raise

    def _batched(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        key = tuple(indices)
        if key not in self._batches:
            self._batches[key] = self.jobs.batches(key)
        return self._batches[key]

    def _step_alone(self, indices: Sequence[int], steps: Steps) -> None:
        for index in indices:
            member = self.members[index]
            steps.apply(member, steps.work(member, self._whole(member, steps.contribute(member))))

    def _step_with_others(
        self, batches: Sequence[tuple[int, ...]], steps: Steps, comm: Communicator
    ) -> Iterator[None]:
        labels = self._labels(batches)
        arriving, own = self._collect(batches[0], steps, comm.reduce, labels[0])
        returning: tuple[tuple[int, ...], _Messages, dict[int, Tensor]] | None = None
        yield
        for number, batch in enumerate(batches):
            arrived, own_arrived = arriving, own
            if number + 1 < len(batches):
                arriving, own = self._collect(
                    batches[number + 1], steps, comm.reduce, labels[number + 1]
                )
            arrived.wait(comm)
            updates = {
                index: steps.work(self.members[index], whole).to(self.dtype).contiguous()
                for index, whole in self._assembled(arrived, own_arrived)
            }
            returned = self._return(batch, updates, comm.gather, labels[number])
            if returning is not None:
                self._apply(*returning, steps, comm)
            returning = batch, returned, updates
        if returning is not None:
            self._apply(*returning, steps, comm)

    def _labels(self, batches: Sequence[tuple[int, ...]]) -> list[str]:
        """Labels that differ if ranks step different members, so that messages never mix."""
        names = (",".join(self.members[index].label for index in batch) for batch in batches)
        return [
            f"{self._name}, batch {number} of {len(batches)} ({zlib.crc32(text.encode()):x})"
            for number, text in enumerate(names, 1)
        ]

    # -- to the owners ---------------------------------------------------------------------------

    def _collect(
        self, batch: Sequence[int], steps: Steps, queue: Collectives, label: str
    ) -> tuple[_Messages, dict[int, Tensor]]:
        """Send this rank's parts to their owners; also return those of the matrices it owns."""
        parts = {}
        for index in batch:
            # Also for matrices of another replica's owner: each rank updates its own momentum.
            part = steps.contribute(self.members[index])
            if self.owners[index] in self.jobs.replica_of[self.rank]:
                parts[index] = part
        messages = self._send(
            queue, self.jobs.to_owners(batch), lambda index, _: parts[index], f"collect {label}"
        )
        return messages, {i: part for i, part in parts.items() if self.owners[i] == self.rank}

    def _assembled(
        self, messages: _Messages, own: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the whole of each matrix of which this rank has its ``own`` part."""
        for index, part in own.items():
            others = {
                rank: messages.parts[index, rank]
                for rank in self.jobs.replica_of[self.rank]
                if (index, rank) in messages.parts
            }
            yield index, self._whole(self.members[index], part, others)

    def _whole(
        self, member: Member, own: Tensor, others: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        if not others:
            return own.to(self.device, self.dtype).reshape(member.matrices.shape)
        whole = torch.empty(member.matrices.shape, dtype=self.dtype, device=self.device)
        for rank, piece in (*others.items(), (self.rank, own)):
            part = member.part(whole, self.jobs.shard_of[rank])
            part.copy_(piece.view(part.shape))
        return whole

    # -- back to all ranks -----------------------------------------------------------------------

    def _return(
        self, batch: Sequence[int], updates: Mapping[int, Tensor], queue: Collectives, label: str
    ) -> _Messages:
        def part_of(index: int, rank: int) -> Tensor:
            return self.members[index].part(updates[index], self.jobs.shard_of[rank])

        return self._send(queue, self.jobs.to_all(batch), part_of, f"return {label}")

    def _apply(
        self,
        batch: Sequence[int],
        messages: _Messages,
        updates: Mapping[int, Tensor],
        steps: Steps,
        comm: Communicator,
    ) -> None:
        messages.wait(comm)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        for index in batch:
            member, owner = self.members[index], self.owners[index]
            if owner == self.rank:
                part = member.part(updates[index], self.jobs.shard_of[self.rank])
            else:
                part = messages.parts.get((index, owner), empty)
            steps.apply(member, part)

    def _send(
        self,
        queue: Collectives,
        flows: Iterable[Flow],
        part_of: Callable[[int, int], Tensor],
        label: str,
    ) -> _Messages:
        """Exchange messages with the ranks that send some to this one, or receive some from it.

        ``part_of`` returns what this rank sends of a member, by its index, to a destination.
        """
        flows = list(flows)
        elements = between(flows)
        if not elements:  # no rank sends anything
            return _Messages(None, {}, {}, {})
        sent: dict[int, Tensor] = {}
        received: dict[int, Tensor] = {}
        for (source, destination), size in elements.items():
            if source == self.rank:
                sent[destination] = torch.empty(size, dtype=self.dtype, device=self.device)
            elif destination == self.rank:
                received[source] = torch.empty(size, dtype=self.dtype, device=self.device)
        starts: Counter[tuple[int, int]] = Counter()  # in the message from rank to rank
        parts: dict[tuple[int, int], Tensor] = {}
        for index, source, destination, size in flows:
            if not size or self.rank not in (source, destination):
                continue
            start = starts[source, destination]
            starts[source, destination] += size
            if source == self.rank:
                part = part_of(index, destination).reshape(-1)
                sent[destination][start : start + size].copy_(part)
            else:
                parts[index, source] = received[source][start : start + size]
        work = queue.exchange({rank: (sent[rank], received[rank]) for rank in sorted(sent)}, label)
        count_sent(self.mesh, work, after_backward=True)
        return _Messages(work, sent, received, parts)
