"""The plan of one model on one mesh, made before anything runs: units, layouts, strategy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import SupportsIndex

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.granularity import Granularities
from shardwise.plan.layout import ParameterSpec
from shardwise.plan.offload import NO_OFFLOAD, OffloadPolicy
from shardwise.plan.options import UnitOptions
from shardwise.plan.policies import Units, choose_units
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy, resolve_strategy
from shardwise.plan.units import UnitPlan, plan_units
from shardwise.plan.wire import UNQUANTIZED, Wire

__all__ = ["Plan", "make_plan"]

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
    leaves: int | None = None  # micro-batches of a step, over all ranks, of a reproducible model

    def __post_init__(self) -> None:
        assert self.units, "the root is a unit"
        assert not self.units[0].name, "the root comes first"
        if not isinstance(self.prefetch, SupportsIndex) or self.prefetch < 0:
            raise PlanError(f"prefetch={self.prefetch!r}: expected 0 or more units")
        if self.leaves is not None:
            self._check_leaves(self.leaves)

    def __repr__(self) -> str:
        copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"Plan({self.strategy.name} over {self.world_size} ranks{copies}, {len(self.units)} "
            f"units, {self.num_parameters:,} parameters: {self.parameter_bytes:,} bytes, of which "
            f"a rank keeps {self.shard_bytes:,})"
        )

    def lenders(self) -> dict[int, int]:
        """By unit that uses parameters of units around it: the innermost of these."""
        found: dict[int, int] = {}
        indices = {unit.name: index for index, unit in enumerate(self.units)}
        for holder, unit in enumerate(self.units):
            for name in (n for one in unit.parameters if len(one.names) > 1 for n in one.names):
                while name := name.rpartition(".")[0]:
                    if indices.get(name, 0) > holder:
                        found[indices[name]] = holder
        return found

    def unfrozen(self, names: Collection[str]) -> "Plan":
        """The same layouts, where buffers that contain any parameter in ``names`` are trainable."""
        return replace(self, units=tuple(_unfrozen(unit, names) for unit in self.units))

    def _check_leaves(self, leaves: int) -> None:
        is_count = isinstance(leaves, int) and not isinstance(leaves, bool) and leaves > 0
        if not is_count or leaves & (leaves - 1):
            raise PlanError(
                f"reproducible={leaves!r}: expected the number of micro-batches in a step, a power "
                "of two, because they are summed in a binary tree"
            )
        if leaves % self.num_ranks:
            raise PlanError(
                f"reproducible={leaves} on {self.num_ranks} ranks: expected a number of ranks that "
                f"divides {leaves}, because each rank runs equally many of its micro-batches"
            )
        for unit in self.units:
            if unit.has_own_ranks:
                raise PlanError(
                    f"reproducible={leaves}: {unit.label} has other ranks than the model, so its "
                    "gradients are summed in another tree; shard it over the ranks of the model"
                )
            if unit.options.wire != UNQUANTIZED:
                raise PlanError(
                    f"reproducible={leaves} with a Wire: expected none, because blocks of "
                    "quantized numbers, and their errors, depend on the number of ranks"
                )

    @property
    def num_ranks(self) -> int:
        """Ranks of both axes."""
        return self.strategy.num_ranks(self.world_size, self.replicas)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(spec.num_elements for unit in self.units for spec in unit.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Size of the unsharded parameters."""
        return sum(spec.num_bytes for unit in self.units for spec in unit.parameters)

    @property
    def shard_bytes(self) -> int:
        """Size of one rank's shards of the parameters."""
        return sum(unit.shard_bytes for unit in self.units)


def _unfrozen(unit: UnitPlan, names: Collection[str]) -> UnitPlan:
    layouts = tuple(
        layout.unfrozen() if any(one.parameter.name in names for one in layout.extents) else layout
        for layout in unit.layouts
    )
    specs = {one.parameter.name: one.parameter for layout in layouts for one in layout.extents}
    return replace(
        unit, layouts=layouts, parameters=tuple(specs[spec.name] for spec in unit.parameters)
    )


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
    manual: Mapping[str, UnitOptions] | None = None,
    settled: Mapping[str, ParameterSpec] | None = None,
    ignored: Collection[str] = (),
    leaves: int | None = None,
) -> Plan:
    """Plan ``root`` without touching its storage; it may be on the meta device.

    `fully_shard` describes the arguments that it shares with this function. With strategies that
    shard nothing, the default for ``units`` is a size of 25 MiB, as in DDP's buckets.

    Args:
        root: the model.
        world_size: number of ranks to shard over.
        replicas: size of the outer axis, which replicates the shards or shards them again.
        manual: more units, by name, each with its own options.
        settled: the specs of parameters that were sharded before, by name.
        ignored: names of parameters that are not sharded.
        leaves: ``reproducible`` of `fully_shard`.

    Raises:
        PlanError: an argument does not fit the model.
    """
    strategy = resolve_strategy(strategy)
    if units is None and not strategy.shards and not manual:
        units = BUCKET_BYTES // max((p.dtype.itemsize for p in root.parameters()), default=1)
    own = UnitOptions(reshard_after_forward, precision, offload, wire)
    chosen = dict.fromkeys(choose_units(root, units), own) | dict(manual or {})
    elsewhere = {name for name, one in chosen.items() if one.world_size}
    options = {
        name: chosen[name]
        if name in elsewhere
        else chosen[name].over(strategy, world_size, replicas)
        for name, _ in root.named_modules()
        if name in chosen
    }
    for name, one in options.items():
        one.check(name or "root")
    return Plan(
        units=plan_units(
            root,
            options,
            granularity,
            settled,
            ignored,
            elsewhere,
            in_blocks=leaves is not None,
        ),
        strategy=strategy,
        world_size=world_size,
        prefetch=prefetch,
        replicas=replicas,
        leaves=leaves,
    )
