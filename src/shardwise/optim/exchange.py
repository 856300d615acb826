"""Brings matrices together on their owners, and sends what these return to all ranks.

Nothing is gathered: a part goes from the rank that has it to the owner, and a part of the result
from the owner to each rank that stores it. Where replicas hold the same parts, the owner's own
replica sends them. Parts of several matrices go in one message, and while an owner works on one
batch of matrices, the next one is on its way and the results of the one before return.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.optim.matrices import Matrices
from shardwise.optim.ownership import Job, OwnedJobs, between
from shardwise.plan.axes import AxisBytes
from shardwise.runtime.ledger import note_sent
from shardwise.tensor.sharding import Sharding, sharding_of
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives, Communicator, communicator

__all__ = ["MatrixExchange", "Member", "Steps"]

_Pieces = Mapping[int, Sequence[Tensor]]  # by rank


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that is updated as `matrices`."""

    parameter: Tensor
    matrices: Matrices
    cost: int  # floating-point operations of its owner
    owner: int | None = None  # that it has already

    @property
    def sharding(self) -> Sharding | None:
        return sharding_of(self.parameter)

    @cached_property
    def num_shards(self) -> int:
        return 1 if self.sharding is None else self.sharding.mesh.size

    def part(self, whole: Tensor, shard: int) -> Tensor:
        """What the rank of a shard stores of ``whole``."""
        return whole if self.sharding is None else self.sharding.part_of(whole, shard)

    @cached_property
    def job(self) -> Job:
        whole = torch.empty(self.matrices.shape, device="meta")
        parts = (self.part(whole, shard).numel() for shard in range(self.num_shards))
        return Job(self.cost, tuple(parts), self.owner)

    @property
    def label(self) -> str:
        """The same on all ranks."""
        return self.matrices.name if self.sharding is None else self.sharding.label


@dataclass(frozen=True)
class Steps:
    """What is done with the members of an exchange, each given by its index."""

    direction: Callable[[int], Tensor]  # what this rank contributes: a tensor like its shard
    work: Callable[[int, Tensor], Tensor]  # on the owner, from the whole to the whole update
    apply: Callable[[int, Tensor], None]  # this rank's part of the update


@dataclass(frozen=True, slots=True)
class _Messages:
    """Parts under way between this rank and others; the memory lives as long as this."""

    work: Work | None
    sent: Mapping[int, Tensor]
    received: Mapping[int, Tensor]


class MatrixExchange:
    """Parameters of one mesh and dtype with their owners.

    Args:
        members: the same on all ranks, in the same order.
        dtype: of what is exchanged and of the matrices that owners work on.
        device: where owners work.
        name: of the optimizer.
    """

    def __init__(
        self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, name: str
    ) -> None:
        self.members = tuple(members)
        self.index_of = {id(member.parameter): i for i, member in enumerate(self.members)}
        self.dtype, self.device, self._name = dtype, device, name
        sharding = members[0].sharding
        self.mesh = None if sharding is None else sharding.mesh
        self.rank = 0 if self.mesh is None else self.mesh.group_rank
        replicas = ((0,),) if self.mesh is None else self.mesh.replicas
        num_rows = 1 if self.mesh is None else self.mesh.size // self.mesh.row.size
        jobs = tuple(member.job for member in self.members)
        self.jobs = OwnedJobs(jobs, replicas, num_rows, dtype.itemsize)
        self.owners = self.jobs.owners
        # Of states that are on owners as a whole.
        self.flat_mesh = None if self.mesh is None else self.mesh.cut_over_all()
        self._batches: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    @property
    def trainable(self) -> list[int]:
        """The indices of members that are not frozen."""
        return [i for i, one in enumerate(self.members) if one.parameter.requires_grad]

    def batches(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """The members that are worked on at a time, of those at ``indices``."""
        key = tuple(indices)
        if key not in self._batches:
            self._batches[key] = self.jobs.batches(key)
        return self._batches[key]

    def sent_bytes(self, indices: Sequence[int], rank: int | None = None) -> AxisBytes:
        """What ``rank``, or else this one, sends in a step of the members at ``indices``."""
        return self.jobs.sent_bytes(self.batches(indices), self.rank if rank is None else rank)

    @contextlib.contextmanager
    def step(self, indices: Sequence[int], steps: Steps) -> Iterator[None]:
        """Update the members at ``indices``; the first parts move during the ``with`` block.

        Raises:
            StepError: a rank raised, is lost or steps other members.
        """
        links = None if self.mesh is None else communicator(self.mesh.world, self.device)
        if not indices:
            yield
            return
        if links is None or links.num_ranks == 1:
            yield
            self._step_alone(indices, steps)
            return
        links.recover()
        try:
            yield from self._step_with_others(self.batches(indices), steps, links)
        except BaseException as error:
            links.abort(error)
            raise

    def _step_alone(self, indices: Sequence[int], steps: Steps) -> None:
        for index in indices:
            steps.apply(index, steps.work(index, self._whole(index, steps.direction(index))))

    def _step_with_others(
        self, batches: Sequence[tuple[int, ...]], steps: Steps, links: Communicator
    ) -> Iterator[None]:
        labels = self._labels(batches)
        coming = self._collect(batches[0], steps, links.reduce, labels[0])
        going: tuple[tuple[int, ...], _Messages, dict[int, Tensor]] | None = None
        yield
        for number, batch in enumerate(batches):
            arrived, own = coming
            if number + 1 < len(batches):
                coming = self._collect(batches[number + 1], steps, links.reduce, labels[number + 1])
            _finish(arrived, links)
            updates = {
                index: steps.work(index, whole).to(self.dtype).contiguous()
                for index, whole in self._assembled(batch, arrived, own)
            }
            returned = self._return(batch, updates, links.gather, labels[number])
            if going is not None:
                self._apply(*going, steps, links)
            going = batch, returned, updates
        if going is not None:
            self._apply(*going, steps, links)

    def _labels(self, batches: Sequence[tuple[int, ...]]) -> list[str]:
        """They differ if ranks step different members, so that these are not mixed up."""
        names = (",".join(self.members[index].label for index in batch) for batch in batches)
        return [
            f"{self._name}, batch {number} of {len(batches)} ({zlib.crc32(text.encode()):x})"
            for number, text in enumerate(names, 1)
        ]

    # -- to the owners ---------------------------------------------------------------------------

    def _collect(
        self, batch: Sequence[int], steps: Steps, queue: Collectives, label: str
    ) -> tuple[_Messages, dict[int, Tensor]]:
        """Send this rank's parts to their owners; what it keeps of its own matrices is returned."""
        sent: dict[int, list[Tensor]] = {}
        own: dict[int, Tensor] = {}
        for index in batch:
            owner = self.owners[index]
            # Replicas have the same directions, and each rank keeps its own momentum.
            direction = steps.direction(index)
            if owner == self.rank:
                own[index] = direction
            elif owner in self.jobs.replica_of[self.rank]:
                sent.setdefault(owner, []).append(direction)
        return self._send(queue, self.jobs.to_owners(batch), sent, f"collect {label}"), own

    def _assembled(
        self, batch: Sequence[int], messages: _Messages, own: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """The matrices of this rank, whole."""
        read = dict.fromkeys(messages.received, 0)
        for index in batch:
            if self.owners[index] != self.rank:
                continue
            member, pieces = self.members[index], dict[int, Tensor]()
            for rank in self.jobs.replica_of[self.rank]:
                size = member.job.parts[self.jobs.shard_of[rank]]
                if rank != self.rank and size:
                    start = read[rank]
                    pieces[rank] = messages.received[rank][start : start + size]
                    read[rank] = start + size
            yield index, self._whole(index, own[index], pieces)

    def _whole(self, index: int, own: Tensor, others: Mapping[int, Tensor] | None = None) -> Tensor:
        member = self.members[index]
        if not others:
            return own.to(self.device, self.dtype).reshape(member.matrices.shape)
        whole = torch.empty(member.matrices.shape, dtype=self.dtype, device=self.device)
        for rank, piece in (*others.items(), (self.rank, own)):
            part = member.part(whole, self.jobs.shard_of[rank])
            part.copy_(piece.view(part.shape))
        return whole

    # -- back to all -----------------------------------------------------------------------------

    def _return(
        self, batch: Sequence[int], updates: Mapping[int, Tensor], queue: Collectives, label: str
    ) -> _Messages:
        sent: dict[int, list[Tensor]] = {}
        for index in batch:
            if index in updates:
                for rank, shard in self.jobs.shard_of.items():
                    if rank != self.rank:
                        part = self.members[index].part(updates[index], shard)
                        sent.setdefault(rank, []).append(part)
        return self._send(queue, self.jobs.to_all(batch), sent, f"return {label}")

    def _apply(
        self,
        batch: Sequence[int],
        messages: _Messages,
        updates: Mapping[int, Tensor],
        steps: Steps,
        links: Communicator,
    ) -> None:
        _finish(messages, links)
        read = dict.fromkeys(messages.received, 0)
        shard = self.jobs.shard_of[self.rank]
        for index in batch:
            member, owner = self.members[index], self.owners[index]
            size = member.job.parts[shard]
            if owner == self.rank:
                part = member.part(updates[index], shard)
            elif size:
                part = messages.received[owner][read[owner] : read[owner] + size]
                read[owner] += size
            else:
                part = torch.empty(0, dtype=self.dtype, device=self.device)
            steps.apply(index, part)

    # -- messages --------------------------------------------------------------------------------

    def _send(
        self,
        queue: Collectives,
        flows: Iterator[tuple[int, int, int]],
        pieces: _Pieces,
        label: str,
    ) -> _Messages:
        """Exchange parts with the ranks that have some for this one, or receive some from it."""
        elements = between(flows)
        if not elements:  # on no rank
            return _Messages(None, {}, {})
        sent: dict[int, Tensor] = {}
        received: dict[int, Tensor] = {}
        for source, destination in elements:
            if self.rank not in (source, destination):
                continue
            other = destination if source == self.rank else source
            into = sent if source == self.rank else received
            size = elements[source, destination]
            into[other] = torch.empty(size, dtype=self.dtype, device=self.device)
        for rank, some in pieces.items():
            start = 0
            for piece in filter(Tensor.numel, some):
                sent[rank][start : start + piece.numel()].copy_(piece.reshape(-1))
                start += piece.numel()
        pairs = {rank: (sent[rank], received[rank]) for rank in sorted(sent)}
        work = queue.exchange(pairs, label)
        note_sent(self.mesh, work, after_backward=True)
        return _Messages(work, sent, received)


def _finish(messages: _Messages, links: Communicator) -> None:
    if messages.work is not None:
        links.wait(messages.work)
