"""The plan: units, strategy and numbers of one model on one mesh, decided before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.granularity import Granularities, Granularity
from shardwise.plan.strategy import Level, Strategy, resolve_strategy
from shardwise.plan.units import Reshard, UnitPlan, Units, choose_units, plan_units

__all__ = ["Plan", "make_plan"]

# Gradients that nothing gathers for are reduced in pieces of about this size (torch's DDP has it).
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Plan:
    """What goes where: ``units`` in module order (a unit before those inside it)."""

    units: tuple[UnitPlan, ...]
    strategy: Strategy
    world_size: int  # ranks of the shard axis
    prefetch: int  # units that are gathered ahead of the one that computes

    def __post_init__(self) -> None:
        assert self.units, "the root is a unit"
        assert not self.units[0].name, "the root comes first"
        if self.prefetch < 0:
            raise PlanError(f"prefetch={self.prefetch}: expected 0 or more units")

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(spec.num_elements for unit in self.units for spec in unit.parameters)

    @property
    def parameter_bytes(self) -> int:
        """What the parameters take in one process."""
        return sum(spec.num_bytes for unit in self.units for spec in unit.parameters)

    @property
    def gradient_bytes(self) -> int:
        """What the gradients take in one process."""
        return sum(p.num_bytes for unit in self.units for p in unit.parameters if p.trainable)

    @property
    def shard_bytes(self) -> int:
        """What one rank keeps of the parameters."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def gradient_shard_bytes(self) -> int:
        """What one rank keeps of the gradients."""
        return sum(unit.gradient_shard_bytes for unit in self.units)


def make_plan(
    root: nn.Module,
    *,
    world_size: int,
    units: Units = None,
    strategy: str | Strategy = "fsdp",
    prefetch: int = 1,
    reshard_after_forward: bool | int | None = None,
    replicas: int = 1,
    manual: Mapping[str, bool | int | None] | None = None,
    granularity: Granularities = "element",
    settled: Mapping[str, Granularity] | None = None,
) -> Plan:
    """Plan ``root`` without touching its storage; a model on the meta device will do.

    Args:
        root: the model.
        world_size: ranks to shard over.
        replicas: how often the outer axis of the mesh repeats (or cuts again) the shards.
        units: a module class or set of classes, ``"auto"`` (the repeated blocks), a size in
            parameters, a policy ``(module, recurse, nonwrapped_numel) -> bool``, or None for one
            unit; where parameters are never cut, None is for units of 25 MiB, DDP's buckets.
        strategy: a row of ``plan.strategy`` or its name.
        prefetch: how many units to gather ahead of the one that computes.
        reshard_after_forward: free a unit after forward and gather it again for backward; None
            does so for every unit but the root, as in FSDP2; a number keeps so much of it that
            as many neighbouring ranks can gather it again among themselves.
        granularity: where parameters may be cut: ``"element"``, ``"row"``, ``"tensor"`` or a
            `block`; for all of them, or by pattern of their names, or as a function of name and
            shape says.
        manual: further units by name, each with its own ``reshard_after_forward``.
        settled: granularities by name of parameters that were sharded before.

    Raises:
        PlanError: an argument does not fit the model.
    """
    strategy = resolve_strategy(strategy)
    if units is None and not strategy.shards and not manual:
        units = _bucket_elements(root)
    choices = dict.fromkeys(choose_units(root, units), reshard_after_forward) | dict(manual or {})
    reshard = {
        name: _reshard(name, choices[name], strategy, world_size, replicas)
        for name, _ in root.named_modules()
        if name in choices
    }
    return Plan(
        units=plan_units(
            root,
            reshard,
            world_size,
            granularity,
            settled,
            holds_gradients=strategy.inner is Level.OPTIMIZER,
        ),
        strategy=strategy,
        world_size=world_size,
        prefetch=prefetch,
    )


def _reshard(
    name: str, choice: bool | int | None, strategy: Strategy, world_size: int, replicas: int
) -> Reshard:
    if isinstance(choice, int) and not isinstance(choice, bool):
        _check_subgroup(name, choice, strategy, world_size)
        if choice in (1, world_size):  # keep all of it, or nothing
            return Reshard(frees=choice > 1)
        return Reshard(frees=True, subgroup=choice)
    is_cut = strategy.inner is Level.PARAMETERS
    frees = is_cut and bool(name) if choice is None else bool(choice)
    if is_cut and strategy.is_two_level and replicas > 1:
        return Reshard(frees, subgroup=world_size // replicas, subgroup_first=True)
    return Reshard(frees)


def _check_subgroup(name: str, size: int, strategy: Strategy, world_size: int) -> None:
    if strategy.is_two_level or strategy.inner is not Level.PARAMETERS:
        raise PlanError(
            f"{name or 'root'}: reshard_after_forward={size}: {strategy} has no parameters to cut "
            "for a smaller group; use True or False, or strategy 'fsdp' or 'hsdp'"
        )
    if size < 1 or world_size % size:
        fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise PlanError(
            f"{name or 'root'}: reshard_after_forward={size}: expected a number that divides the "
            f"{world_size} ranks of the shard axis: {fitting}"
        )


def _bucket_elements(root: nn.Module) -> int:
    itemsize = max((p.dtype.itemsize for p in root.parameters()), default=1)
    return BUCKET_BYTES // itemsize
