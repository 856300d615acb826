"""The plan of one model on one mesh, made before anything runs: units, layouts, strategy."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.granularity import Granularities
from shardwise.plan.layout import ParameterSpec
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.policies import Units, choose_units
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.plan.spelling import divisors
from shardwise.plan.strategy import Level, Strategy, resolve_strategy
from shardwise.plan.units import UnitOptions, UnitPlan, plan_units
from shardwise.plan.wire import UNQUANTIZED, Wire

__all__ = ["Plan", "UnitChoice", "UnitRanks", "UnitSettings", "make_plan"]

# Unit size for strategies that gather nothing: the size of DDP's gradient buckets.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Plan:
    """The units of a model, in module order (a unit before those inside it), and its ranks."""

    units: tuple[UnitPlan, ...]
    strategy: Strategy
    world_size: int  # ranks of the shard axis
    prefetch: int  # units gathered ahead of the one that computes
    replicas: int = 1  # size of the outer axis, which replicates the shards or shards them again

    def __post_init__(self) -> None:
        assert self.units, "the root is a unit"
        assert not self.units[0].name, "the root comes first"
        if self.prefetch < 0:
            raise PlanError(f"prefetch={self.prefetch}: expected 0 or more units")

    def __repr__(self) -> str:
        copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"Plan({self.strategy.name} over {self.world_size} ranks{copies}, {len(self.units)} "
            f"units, {self.num_parameters:,} parameters: {self.parameter_bytes:,} bytes, of which "
            f"a rank keeps {self.shard_bytes:,})"
        )

    def unfrozen(self, names: Collection[str]) -> "Plan":
        """The same layouts, where buffers that contain any parameter in ``names`` are trainable."""
        return replace(self, units=tuple(_unfrozen(unit, names) for unit in self.units))

    @property
    def num_ranks(self) -> int:
        """Ranks of both axes."""
        return self.world_size * (1 if self.strategy.is_two_level else self.replicas)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(spec.num_elements for unit in self.units for spec in unit.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Size of the unsharded parameters."""
        return sum(spec.num_bytes for unit in self.units for spec in unit.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Size of the unsharded gradients."""
        return sum(p.num_bytes for unit in self.units for p in unit.parameters if p.trainable)

    @property
    def shard_bytes(self) -> int:
        """Size of one rank's shards of the parameters."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def gradient_shard_bytes(self) -> int:
        """Size of one rank's shards of the gradients."""
        return sum(unit.gradient_shard_bytes for unit in self.units)


def _unfrozen(unit: UnitPlan, names: Collection[str]) -> UnitPlan:
    layouts = tuple(
        layout.unfrozen() if any(one.parameter.name in names for one in layout.extents) else layout
        for layout in unit.layouts
    )
    specs = {one.parameter.name: one.parameter for layout in layouts for one in layout.extents}
    return replace(
        unit, layouts=layouts, parameters=tuple(specs[spec.name] for spec in unit.parameters)
    )


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """The strategy and the ranks of a unit, with the fields of `Plan`."""

    strategy: Strategy
    world_size: int
    replicas: int


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """The options that a user may choose for a single unit."""

    reshard_after_forward: bool | int | None = None
    precision: MixedPrecisionPolicy = DEFAULT_PRECISION
    offload: OffloadPolicy = NO_OFFLOAD
    wire: Wire = UNQUANTIZED
    ranks: UnitRanks | None = None  # None: those of the model around it


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
    only_sums: bool = False  # divide the sums in a separate pass, not in the backend
    collective_memory: str = "own"  # a `MemoryKind`; the same for all units of a model
    # Replaces the collective that reduces gradients: called as hook(gradients), to be reduced in
    # place, or, where parameters are sharded, as hook(gradients, shard). Gradients are undivided.
    reduce_hook: Callable[..., None] | None = None
    reduced_hook: Callable[..., None] | None = None  # called with the reduced gradients [S]
    # Continues a reduction over replicas that are not in the mesh: called as across(work, sum [S])
    # for gradients and across(work, flags, is_max=True), it returns the work that ends with both.
    across_replicas: Callable[..., Any] | None = None

    @property
    def reduces_fully(self) -> bool:
        """Whether every backward reduces the unit's gradients completely."""
        return self.reduce_grads and self.all_reduce_grads


def make_plan(
    root: nn.Module,
    *,
    world_size: int,
    units: Units = None,
    strategy: str | Strategy = "fsdp",
    prefetch: int = 1,
    reshard_after_forward: bool | int | None = None,
    replicas: int = 1,
    granularity: Granularities = "element",
    precision: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload: OffloadPolicy = NO_OFFLOAD,
    wire: Wire = UNQUANTIZED,
    manual: Mapping[str, UnitChoice] | None = None,
    settled: Mapping[str, ParameterSpec] | None = None,
    ignored: Collection[str] = (),
) -> Plan:
    """Plan ``root`` without touching its storage; it may be on the meta device.

    `fully_shard` describes the arguments that it shares with this function. With strategies that
    shard nothing, the default for ``units`` is a size of 25 MiB, as in DDP's buckets.

    Args:
        root: the model.
        world_size: number of ranks to shard over.
        replicas: size of the outer axis, which replicates the shards or shards them again.
        manual: more units, by name, each with its own choices.
        settled: the specs of parameters that were sharded before, by name.
        ignored: names of parameters that are not sharded.

    Raises:
        PlanError: an argument does not fit the model.
    """
    strategy = resolve_strategy(strategy)
    if units is None and not strategy.shards and not manual:
        units = BUCKET_BYTES // max((p.dtype.itemsize for p in root.parameters()), default=1)
    own = UnitChoice(reshard_after_forward, precision, offload, wire)
    choices = dict.fromkeys(choose_units(root, units), own) | dict(manual or {})
    ranks = UnitRanks(strategy, world_size, replicas)
    options = {
        name: _options(name, choices[name], ranks)
        for name, _ in root.named_modules()
        if name in choices
    }
    return Plan(
        units=plan_units(root, options, world_size, granularity, settled, ignored),
        strategy=strategy,
        world_size=world_size,
        prefetch=prefetch,
        replicas=replicas,
    )


def _options(name: str, choice: UnitChoice, model_ranks: UnitRanks) -> UnitOptions:
    ranks = choice.ranks or model_ranks
    strategy, world_size, replicas = ranks.strategy, ranks.world_size, ranks.replicas
    is_cut = strategy.inner is Level.PARAMETERS
    after = choice.reshard_after_forward
    reshard = is_cut and bool(name) if after is None else bool(after)
    subgroup = 0
    if isinstance(after, int) and not isinstance(after, bool):
        _check_subgroup(name, after, strategy, world_size)
        reshard = after > 1  # a subgroup of one rank keeps the whole unit
        subgroup = after if 1 < after < world_size else 0
    two_level = is_cut and strategy.is_two_level and replicas > 1
    row = world_size // replicas if strategy.is_two_level else world_size
    choice.wire.check_hosts(name or "root", row if row > 1 else replicas)
    return UnitOptions(
        reshard=reshard,
        subgroup=world_size // replicas if two_level else subgroup,
        two_level_gather=two_level,
        num_shards=None if choice.ranks is None else world_size,
        holds_gradients=strategy.inner is Level.OPTIMIZER,
        precision=choice.precision,
        offload=choice.offload if isinstance(choice.offload, CPUOffloadPolicy) else None,
        wire=choice.wire,
    )


def _check_subgroup(name: str, size: int, strategy: Strategy, world_size: int) -> None:
    if strategy.is_two_level or strategy.inner is not Level.PARAMETERS:
        raise PlanError(
            f"{name or 'root'}: reshard_after_forward={size}: {strategy} does not shard "
            "parameters over subgroups; use True or False, or strategy 'fsdp' or 'hsdp'"
        )
    if size < 1 or world_size % size:
        raise PlanError(
            f"{name or 'root'}: reshard_after_forward={size}: expected a number that divides the "
            f"{world_size} ranks of the shard axis: {divisors(world_size)}"
        )
