"""Which rank works on which matrix: integers only, the same answer on every rank.

A matrix belongs to one rank of the whole world, its owner. The work is balanced over the ranks, and
within `SLACK` of an equal share a rank that holds much of a matrix comes first, since what it holds
need not be sent. Balancing whole matrices over ranks is the longest-processing-time rule (Graham,
1969); Distributed Shampoo (Shi et al., 2023, arXiv 2309.06497) and Moonlight (Liu et al., 2025,
arXiv 2502.16982) divide the work of such optimizers over ranks, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.axes import AxisBytes

__all__ = ["Job", "OwnedJobs", "assign_owners", "between", "in_batches"]

SLACK = 0.1
BATCH_BYTES = 1 << 24  # of matrices that an owner works on while the next ones are exchanged
_Flow = tuple[int, int, int]  # source, destination and number of elements


@dataclass(frozen=True, slots=True)
class Job:
    """The work on one matrix."""

    cost: int  # floating-point operations
    parts: tuple[int, ...]  # elements by shard
    owner: int | None = None  # that it has already, and keeps

    @property
    def num_elements(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True)
class OwnedJobs:
    """Jobs with their owners, and what ranks send each other for them.

    Args:
        jobs: the same on all ranks, in the same order.
        replicas: the ranks of each replica of the model, by shard.
        num_rows: rows of the mesh that the ranks of a replica are in: several with two levels of
            sharding, where the ranks of a column have neighboring shards.
        itemsize: bytes of an element that is sent.
    """

    jobs: tuple[Job, ...]
    replicas: tuple[tuple[int, ...], ...]
    num_rows: int
    itemsize: int

    @cached_property
    def shard_of(self) -> dict[int, int]:
        """The shard that each rank holds."""
        return {rank: i for ranks in self.replicas for i, rank in enumerate(ranks)}

    @cached_property
    def replica_of(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each rank's replica."""
        return {rank: ranks for ranks in self.replicas for rank in ranks}

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return assign_owners(self.jobs, [self.shard_of[rank] for rank in sorted(self.shard_of)])

    def batches(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """The jobs that are worked on at a time, of those at ``indices``."""
        jobs = [self.jobs[index] for index in indices]
        owners = [self.owners[index] for index in indices]
        found = in_batches(jobs, owners, -(-BATCH_BYTES // self.itemsize))
        return [tuple(indices[i] for i in batch) for batch in found]

    def to_owners(self, batch: Sequence[int]) -> Iterator[_Flow]:
        """The parts of matrices."""
        for index in batch:
            owner = self.owners[index]
            for rank in self.replica_of[owner]:
                if rank != owner:
                    yield rank, owner, self.jobs[index].parts[self.shard_of[rank]]

    def to_all(self, batch: Sequence[int]) -> Iterator[_Flow]:
        """The parts of updates."""
        for index in batch:
            owner = self.owners[index]
            for rank, shard in self.shard_of.items():
                if rank != owner:
                    yield owner, rank, self.jobs[index].parts[shard]

    def sent_bytes(self, batches: Sequence[Sequence[int]], rank: int) -> AxisBytes:
        """What ``rank`` sends in a step of these batches."""
        in_row = elsewhere = 0
        for batch in batches:
            for flows in (self.to_owners(batch), self.to_all(batch)):
                for (source, destination), elements in between(flows).items():
                    if source == rank and self._row(destination) == self._row(rank):
                        in_row += elements
                    elif source == rank:
                        elsewhere += elements
        return AxisBytes(in_row * self.itemsize, elsewhere * self.itemsize)

    def _row(self, rank: int) -> tuple[int, int]:
        """A row of the mesh: by the first rank of its replica, and the row within that."""
        return self.replica_of[rank][0], self.shard_of[rank] % self.num_rows


def between(flows: Iterator[_Flow]) -> dict[tuple[int, int], int]:
    """Elements from rank to rank, 1 at least in both directions of each pair that has any."""
    elements: dict[tuple[int, int], int] = {}
    for source, destination, size in flows:
        if size:
            for pair in ((source, destination), (destination, source)):
                elements.setdefault(pair, 0)
            elements[source, destination] += size
    return {pair: max(1, size) for pair, size in elements.items()}


def assign_owners(jobs: Sequence[Job], shard_of: Sequence[int]) -> tuple[int, ...]:
    """The owner of each job; ``shard_of`` is the shard that a rank holds, by rank.

    A job that has an owner keeps it. One that is whole on a rank, or on several, belongs to one of
    them.
    """
    ranks = range(len(shard_of))
    loads = [sum(job.cost for job in jobs if job.owner == rank) for rank in ranks]
    share = sum(job.cost for job in jobs) / len(ranks) * (1 + SLACK)
    owners = [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda index: (-jobs[index].cost, index)):
        job = jobs[index]
        if job.owner is not None:
            owners[index] = job.owner
            continue
        held = [job.parts[shard_of[rank]] for rank in ranks]
        least = min(loads)
        if max(held) == job.num_elements:
            fitting = [rank for rank in ranks if held[rank] == job.num_elements]
            owner = min(fitting, key=lambda rank: (loads[rank], rank))
        else:
            fitting = [rank for rank in ranks if loads[rank] + job.cost <= share]
            fitting = fitting or [rank for rank in ranks if loads[rank] == least]
            owner = min(fitting, key=lambda rank: (-held[rank], loads[rank], rank))
        owners[index] = owner
        loads[owner] += job.cost
    return tuple(owners)


def in_batches(
    jobs: Sequence[Job], owners: Sequence[int], max_elements: int
) -> list[tuple[int, ...]]:
    """The indices of ``jobs`` in batches of at most about ``max_elements`` for each owner.

    Each owner has about as many matrices in one batch as in the next, the most expensive ones
    first, so it works on one batch while the next is on its way.
    """
    by_owner: dict[int, list[int]] = {}
    for index in sorted(range(len(jobs)), key=lambda index: (-jobs[index].cost, index)):
        by_owner.setdefault(owners[index], []).append(index)
    lists = by_owner.values()
    most = max((sum(jobs[index].num_elements for index in own) for own in lists), default=0)
    longest = max(map(len, lists), default=0)
    num_batches = min(max(1, -(-most // max_elements)), longest)
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    for own in lists:
        for position, index in enumerate(own):
            batches[position * num_batches // len(own)].append(index)
    return [tuple(sorted(batch)) for batch in batches]
