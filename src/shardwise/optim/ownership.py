"""Which rank works on which matrix. Pure integer code with the same result on every rank.

Each matrix has one owner among all ranks. Work is balanced over the ranks by the
longest-processing-time rule (Graham, 1969). Among ranks that stay within `SLACK` of an equal share,
the one that holds the most of a matrix becomes its owner, because that part need not be sent.
Distributed Shampoo (Shi et al., 2023, arXiv 2309.06497) and Moonlight (Liu et al., 2025, arXiv
2502.16982) also divide such work over ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.axes import AxisBytes

__all__ = ["Flow", "Job", "OwnedJobs", "between"]

SLACK = 0.1
BATCH_BYTES = 1 << 24  # an owner works on one batch while the next one is exchanged
Flow = tuple[int, int, int, int]  # job, source, destination and number of elements


@dataclass(frozen=True, slots=True)
class Job:
    cost: int  # floating-point operations
    parts: tuple[int, ...]  # the number of elements in each shard
    owner: int | None = None  # the owner that has its states already

    @property
    def num_elements(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True)
class OwnedJobs:
    """Jobs with their owners, and what ranks send each other for them."""

    jobs: tuple[Job, ...]  # the same on all ranks, in the same order
    replicas: tuple[tuple[int, ...], ...]  # of the model; their ranks in the order of the shards
    # The mesh rows that a replica spans: more than 1 with two levels of sharding, where the ranks
    # of a column have neighboring shards.
    num_rows: int
    itemsize: int  # bytes per element that is sent

    @cached_property
    def shard_of(self) -> dict[int, int]:
        return {rank: i for ranks in self.replicas for i, rank in enumerate(ranks)}

    @cached_property
    def replica_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: ranks for ranks in self.replicas for rank in ranks}

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return _assign_owners(self.jobs, [self.shard_of[rank] for rank in sorted(self.shard_of)])

    def batches(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Divide the jobs at ``indices`` into batches of about `BATCH_BYTES` per owner at most.

        Each owner has about the same number of matrices in every batch, the most expensive ones in
        the first, so that it can work on one batch while the next is exchanged.
        """
        by_owner: dict[int, list[int]] = {}
        for index in sorted(indices, key=lambda index: (-self.jobs[index].cost, index)):
            by_owner.setdefault(self.owners[index], []).append(index)
        lists = by_owner.values()
        sizes = [sum(self.jobs[index].num_elements for index in own) for own in lists]
        longest = max(map(len, lists), default=0)
        max_elements = -(-BATCH_BYTES // self.itemsize)
        num_batches = min(max(1, -(-max(sizes, default=0) // max_elements)), longest)
        batches: list[list[int]] = [[] for _ in range(num_batches)]
        for own in lists:
            for position, index in enumerate(own):
                batches[position * num_batches // len(own)].append(index)
        return [tuple(sorted(batch)) for batch in batches]

    def to_owners(self, batch: Sequence[int]) -> Iterator[Flow]:
        """Yield what each rank sends to owners: its parts of matrices."""
        for index in batch:
            owner = self.owners[index]
            for rank in self.replica_of[owner]:
                if rank != owner:
                    yield index, rank, owner, self.jobs[index].parts[self.shard_of[rank]]

    def to_all(self, batch: Sequence[int]) -> Iterator[Flow]:
        """Yield what owners send to each rank: its parts of updates."""
        for index in batch:
            owner = self.owners[index]
            for rank, shard in self.shard_of.items():
                if rank != owner:
                    yield index, owner, rank, self.jobs[index].parts[shard]

    def sent_bytes(self, batches: Sequence[Sequence[int]], rank: int) -> AxisBytes:
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
        """The mesh row of ``rank``: the first rank of its replica, and the row in that replica."""
        return self.replica_of[rank][0], self.shard_of[rank] % self.num_rows


def between(flows: Iterable[Flow]) -> dict[tuple[int, int], int]:
    """Elements by (source, destination): at least 1 both ways for each pair that exchanges any."""
    elements: dict[tuple[int, int], int] = {}
    for _, source, destination, size in flows:
        if size:
            for pair in ((source, destination), (destination, source)):
                elements.setdefault(pair, 0)
            elements[source, destination] += size
    return {pair: max(1, size) for pair, size in elements.items()}


def _assign_owners(jobs: Sequence[Job], shard_of: Sequence[int]) -> tuple[int, ...]:
    """The owner of each job. ``shard_of`` gives the shard that each rank holds.

    A job that has an owner keeps it. A matrix that is whole on one or more ranks gets one of these
    as its owner.
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
        if max(held) == job.num_elements:
            fitting = [rank for rank in ranks if held[rank] == job.num_elements]
            owner = min(fitting, key=lambda rank: (loads[rank], rank))
        else:
            fitting = [rank for rank in ranks if loads[rank] + job.cost <= share]
            least = min(loads)
            fitting = fitting or [rank for rank in ranks if loads[rank] == least]
            owner = min(fitting, key=lambda rank: (-held[rank], loads[rank], rank))
        owners[index] = owner
        loads[owner] += job.cost
    return tuple(owners)
