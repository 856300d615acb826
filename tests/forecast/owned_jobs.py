"""The jobs of an optimizer's matrix owners, made from those that a forecast predicts."""

from shardwise.forecast.time.owned import PlannedOwners
from shardwise.optim.matrices import Matrices, cost_of
from shardwise.optim.ownership import Job, OwnedJobs

__all__ = ["owned_jobs"]


def owned_jobs(owners: PlannedOwners) -> OwnedJobs:
    """Return the jobs of an optimizer with this work."""
    plan = owners.plan
    jobs = (
        Job(
            max(cost_of(products), Matrices(one.parameter.name, one.parameter.shape).num_matrices),
            tuple(layout.num_owned(one, rank) for rank in range(layout.world_size)),
        )
        for (layout, one), products in zip(owners.placed, owners.products, strict=True)
    )
    size, replicas = owners.ranks.world_size, owners.ranks.replicas
    numbers = tuple(tuple(range(at, at + size)) for at in range(0, size * replicas, size))
    if plan.strategy.is_two_level:  # the ranks of a column have neighboring shards
        row = size // replicas
        numbers = (tuple(column + row * i for column in range(row) for i in range(replicas)),)
    num_rows = replicas if plan.strategy.is_two_level else 1
    return OwnedJobs(tuple(jobs), numbers, num_rows, owners.itemsize)
