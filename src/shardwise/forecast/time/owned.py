"""The work of the owners of matrices in `sw.optim.Muon` and `SOAP`, and how long it takes.

An owner receives the parts of a batch of matrices, works on them, and returns the parts of their
updates. The next batch arrives and the one before returns meanwhile, so the first collection and
the last return are exposed::

    exchange  collect 1 | collect 2 . return 1 | collect 3 . return 2 |  return 3
    owner               |        work 1        |        work 2  | work 3

Hidden matrices are those of the units without child units; AdamW updates all other parameters.
"""

import heapq
from dataclasses import astuple, dataclass
from functools import cached_property

from shardwise.forecast.machines.machine import Group, Machine
from shardwise.forecast.states import hidden_matrices, owner_ranks
from shardwise.forecast.work import Kind, Operation
from shardwise.optim.matrices import Matrices, Product
from shardwise.optim.ownership import BATCH_BYTES
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan

__all__ = ["SOAP_LARGEST_SIDE", "Load", "PlannedOwners", "largest_part", "returned_copies"]

_MUON_STEPS = 5
_SOAP_FREQUENCY = 10
SOAP_LARGEST_SIDE = 10_000  # `max_precondition_dim`


@dataclass(frozen=True)
class PlannedOwners:
    """The owners of the hidden matrices of ``plan``, with default options of the optimizer.

    Attributes:
        plan: plan of the model.
        optimizer: "muon" or "soap".
        itemsize: bytes of an element that is sent and computed with: for Muon 2 on accelerators and
            4 on CPUs, for SOAP 4.
        own_ranks: whether the matrices are those of units with their own ranks (experts), whose
            owners are among these ranks.
    """

    plan: Plan
    optimizer: str
    itemsize: int
    own_ranks: bool = False

    @cached_property
    def products(self) -> tuple[tuple[Product, ...], ...]:
        """The matrix products that update each parameter."""
        return tuple(
            tuple(
                one.orthogonalization(_MUON_STEPS)
                if self.optimizer == "muon"
                else one.preconditioning(_SOAP_FREQUENCY, SOAP_LARGEST_SIDE)
            )
            for one in self._matrices
        )

    @cached_property
    def _matrices(self) -> tuple[Matrices, ...]:
        found = (extent.parameter for _, extent in self.placed)
        return tuple(Matrices(one.name, one.shape) for one in found)

    @cached_property
    def placed(self) -> tuple[tuple[Layout, ParameterExtent], ...]:
        """The matrices, and where they are."""
        return tuple(hidden_matrices(self.plan, own_ranks=self.own_ranks))

    @cached_property
    def ranks(self) -> UnitOptions:
        """The options of the units, with the ranks among which the owners are."""
        return owner_ranks(self.plan)[self.own_ranks]

    def seconds(self, machine: Machine, group: Group) -> float:
        """Predict how long the exchange and the work of the slowest owner take.

        Args:
            machine: machine that runs the ranks.
            group: these ranks.
        """
        if not self._matrices:
            return 0.0
        loads = self.loads(machine)
        num_batches = max(load.num_batches(self.itemsize) for load in loads)
        collect, give_back = (  # seconds per batch
            # The bytes of an all-to-all include what a rank sends to itself.
            machine.all_to_all_seconds(
                num_bytes / num_batches * group.size / max(1, group.size - 1), group
            )
            for num_bytes in self.exchanged_bytes(loads)
        )
        between = (num_batches - 1) * (collect + give_back)
        return collect + max(*(load.seconds for load in loads), between) + give_back

    def exchanged_bytes(self, loads: "list[Load]") -> tuple[int, int]:
        """Predict the bytes to owners and back, as the maximum that one rank sends or receives."""
        sums = [(sum(load.collected for load in loads), self.ranks.world_size)]
        sums += [(sum(load.returned for load in loads), self.ranks.num_ranks)]
        most = max(load.collected for load in loads), max(load.returned for load in loads)
        to_owners, back = (
            max(one, -(-total // ranks)) * self.itemsize
            for one, (total, ranks) in zip(most, sums, strict=True)
        )
        return to_owners, back

    def loads(self, machine: Machine) -> "list[Load]":
        """Balance the work over owners, in time that does not grow with the number of ranks.

        Those of `OwnerOptimizer` differ only among ranks with about as much work.
        """
        known: dict[Product, float] = {}
        jobs = []
        for (layout, extent), products in zip(self.placed, self.products, strict=True):
            for one in products:
                if one not in known:
                    known[one] = one.times * machine.operation_seconds(self._operation(one))
            size, largest = extent.parameter.num_elements, largest_part(layout, extent)
            seconds = sum(known[one] for one in products)
            returned = size * returned_copies(self.ranks) - largest
            jobs.append(Load(seconds, 1, size, size - largest, returned))
        loads = [Load()] * min(len(jobs), self.ranks.num_ranks)
        for job in sorted(jobs, reverse=True):
            heapq.heapreplace(loads, loads[0] + job)
        return loads

    def _operation(self, product: Product) -> Operation:
        batch, m, n, k = product.shape
        reads = ((0, batch * m * k * self.itemsize), (1, batch * k * n * self.itemsize))
        writes = ((2, batch * m * n * self.itemsize),)
        name = "mm" if batch == 1 else "bmm"
        return Operation(
            name, Kind.MATMUL, product.flops, product.shape, self.itemsize, reads, writes
        )


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """The work of one owner."""

    seconds: float = 0.0
    num_jobs: int = 0
    elements: int = 0
    collected: int = 0  # elements that it receives from other ranks
    returned: int = 0  # elements that it sends back

    def __add__(self, other: "Load") -> "Load":
        return Load(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def num_batches(self, itemsize: int) -> int:
        """Return the number of batches in which an owner works, as `OwnedJobs.batches` does."""
        return max(1, min(self.num_jobs, -(-self.elements * itemsize // BATCH_BYTES)))


def returned_copies(ranks: UnitOptions) -> int:
    """Return how many copies of an update an owner returns: one for each replica."""
    return ranks.num_ranks // ranks.world_size


def largest_part(layout: Layout, extent: ParameterExtent) -> int:
    """Return the largest number of a parameter's elements that one rank holds."""
    size, shard = extent.parameter.num_elements, layout.shard_elements
    first = min(size, shard - extent.offset % shard)
    return max(first, min(shard, size - first))
