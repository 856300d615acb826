"""The options of a unit: what was chosen for it, and what may change while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from shardwise.errors import PlanError
from shardwise.plan.offload import NO_OFFLOAD, OffloadPolicy
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.plan.spelling import divisors
from shardwise.plan.strategy import PRESETS, Level, Strategy
from shardwise.plan.wire import UNQUANTIZED, Wire

__all__ = ["UnitOptions", "UnitSettings"]


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """What was chosen for one unit, and what follows from it."""

    reshard_after_forward: bool | int | None = None  # None: True, except for the root
    precision: MixedPrecisionPolicy = DEFAULT_PRECISION
    offload: OffloadPolicy = NO_OFFLOAD
    wire: Wire = UNQUANTIZED
    # Its ranks, with the fields of `Plan`; a world size of 0: those of the model around it.
    strategy: Strategy = PRESETS["fsdp"]
    world_size: int = 0
    replicas: int = 1

    def over(self, strategy: Strategy, world_size: int, replicas: int) -> "UnitOptions":
        """The same for a unit on these ranks."""
        return replace(self, strategy=strategy, world_size=world_size, replicas=replicas)

    @property
    def num_ranks(self) -> int:
        """Ranks of both axes."""
        return self.strategy.num_ranks(self.world_size, self.replicas)

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are gathered unit by unit."""
        return self.strategy.inner is Level.PARAMETERS

    @property
    def subgroup_size(self) -> int:
        """How many ranks keep one copy of it after forward, if that was chosen; 0 otherwise."""
        after = self.reshard_after_forward
        return 0 if after is None or isinstance(after, bool) else after

    def check(self, name: str) -> None:
        """Raise a PlanError if they do not fit together; ``name`` is that of the unit."""
        if self.reshard_after_forward is not None and not isinstance(
            self.reshard_after_forward, bool
        ):
            self._check_subgroup(name, self.reshard_after_forward)
        size, replicas = self.world_size, self.replicas
        row = size // replicas if self.strategy.is_two_level else size
        self.wire.check_hosts(name, row if row > 1 else replicas)

    def _check_subgroup(self, name: str, size: int) -> None:
        if self.strategy.is_two_level or not self.shards_parameters:
            raise PlanError(
                f"{name}: reshard_after_forward={size}: {self.strategy} does not shard "
                "parameters over subgroups; use True or False, or strategy 'fsdp' or 'hsdp'"
            )
        if not isinstance(size, SupportsIndex) or size < 1 or self.world_size % size:
            raise PlanError(
                f"{name}: reshard_after_forward={size!r}: expected a number that divides the "
                f"{self.world_size} ranks of the shard axis: {divisors(self.world_size)}"
            )


@dataclass(slots=True)
class UnitSettings:
    """The options of a unit that a user may change at any time.

    The module stores them, because sharding the module around it creates a new unit.
    """

    reshard_after_forward: bool | None = None  # None: as planned
    # False: only after a backward that reduces its gradients, because an optimizer may step then.
    reshard_after_backward: bool = True
    reduce_grads: bool = True  # False: accumulate gradients, and reduce them in a later backward
    all_reduce_grads: bool = True  # False: reduce over the outer axis in a later backward
    gradient_divisor: float | None = None  # of sums over ranks; None: the number of ranks
    num_computing: int | None = None  # the divisor in a step in which only some ranks compute
    only_sums: bool = False  # divide the sums in a separate pass, not in the backend
    collective_memory: str = "own"  # a `MemoryKind`; the same for all units of a model
    # Replaces the collective that reduces gradients: called as hook(gradients), to be reduced in
    # place, or, where parameters are sharded, as hook(gradients, shard). Gradients are undivided.
    collective_hook: Callable[..., None] | None = None
    shard_hook: Callable[..., None] | None = None  # called with the reduced gradients [S]
    # Continues a reduction over replicas that are not in the mesh: called as across(work, sum [S])
    # for gradients and across(work, flags, is_max=True), it returns the work that ends with both.
    across_replicas: Callable[..., Any] | None = None

    @property
    def reduces_fully(self) -> bool:
        """Whether every backward reduces the unit's gradients completely."""
        return self.reduce_grads and self.all_reduce_grads
