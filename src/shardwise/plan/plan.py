"""The plan: units, strategy and numbers of one model on one mesh, decided before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.strategy import Placement, Strategy, resolve_strategy
from shardwise.plan.units import UnitPlan, Units, choose_units, plan_units

__all__ = ["Plan", "make_plan"]


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
    reshard_after_forward: bool | None = None,
    manual: Mapping[str, bool | None] | None = None,
) -> Plan:
    """Plan ``root`` without touching its storage; a model on the meta device will do.

    Args:
        root: the model.
        world_size: ranks to shard over.
        units: a module class or set of classes, ``"auto"`` (the repeated blocks), a size in
            parameters, a policy ``(module, recurse, nonwrapped_numel) -> bool``, or None for one
            unit.
        strategy: a row of ``plan.strategy`` or its name.
        prefetch: how many units to gather ahead of the one that computes.
        reshard_after_forward: free a unit after forward and gather it again for backward; None
            does so for every unit but the root, as in FSDP2.
        manual: further units by name, each with its own ``reshard_after_forward``.

    Raises:
        PlanError: an argument does not fit the model.
    """
    strategy = resolve_strategy(strategy)
    frees = strategy.parameters is Placement.SHARD
    choices = dict.fromkeys(choose_units(root, units), reshard_after_forward) | dict(manual or {})
    reshard = {
        name: frees and bool(name) if choices[name] is None else bool(choices[name])
        for name, _ in root.named_modules()
        if name in choices
    }
    return Plan(
        units=plan_units(root, reshard, world_size),
        strategy=strategy,
        world_size=world_size,
        prefetch=prefetch,
    )
