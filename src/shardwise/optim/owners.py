"""Which rank works on which matrix: integers only, the same answer on every rank.

A matrix belongs to one rank of the whole world, its owner. The work is balanced over the ranks, and
within `SLACK` of an equal share a rank that holds much of a matrix comes first, since what it holds
need not be sent. Balancing whole matrices over ranks is the longest-processing-time rule (Graham,
1969); Distributed Shampoo (Shi et al., 2023, arXiv 2309.06497) and Moonlight (Liu et al., 2025,
arXiv 2502.16982) divide the work of such optimizers over ranks, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Job", "assign_owners", "in_batches"]

SLACK = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """The work on one matrix."""

    cost: int  # floating-point operations
    parts: tuple[int, ...]  # elements by shard

    @property
    def num_elements(self) -> int:
        return sum(self.parts)


def assign_owners(jobs: Sequence[Job], shard_of: Sequence[int]) -> tuple[int, ...]:
    """The owner of each job; ``shard_of`` is the shard that a rank holds, by rank.

    A job that is whole on a rank, or on several, belongs to one of them.
    """
    ranks = range(len(shard_of))
    loads = [0] * len(ranks)
    share = sum(job.cost for job in jobs) / len(ranks) * (1 + SLACK)
    owners = [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda index: (-jobs[index].cost, index)):
        job = jobs[index]
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
