"""What each switch of a configuration costs and saves, from the plan with it and without it.

Nothing is measured here, and activations are not in a plan: what a run kept of them, it tells at
its end.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import nn

from shardwise.plan.plan import Plan
from shardwise.schedule.events import EventKind
from shardwise.schedule.sequencer import schedule
from shardwise.train.build import build_plan
from shardwise.train.config import Config
from shardwise.train.memory import foresee, one_rank

__all__ = ["Figures", "Switch", "weigh"]

SWITCHES = (
    "precision.compute",
    "precision.reduce",
    "memory.checkpoint_every",
    "memory.accumulate",
    "memory.offload",
    "memory.step_in_backward",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one rank and one step."""

    device_bytes: int  # at the peak, activations aside
    host_bytes: int
    link_bytes: int  # whole units gathered, and whole gradients reduced
    copied_bytes: int  # between host and device
    recomputed: float  # share of the blocks that run forward twice

    def minus(self, other: "Figures") -> "Figures":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Figures(*(one - another for one, another in pairs))


@dataclass(frozen=True, slots=True)
class Switch:
    """One that is not where it is by default."""

    name: str  # "memory.offload"
    value: object
    change: Figures  # against the same run with the default


def weigh(config: Config, model: nn.Module, device: str) -> list[Switch]:
    """Every switch of ``config`` that is used, for ``model`` before it is sharded."""
    found = []
    with_it = _figures(config, model, device)
    for name in SWITCHES:
        section, key = name.split(".")
        own, defaults = getattr(config, section), getattr(Config(), section)
        value, default = getattr(own, key), getattr(defaults, key)
        if value == default:
            continue
        without = config.model_copy(update={section: own.model_copy(update={key: default})})
        change = with_it.minus(_figures(without, model, device))
        found.append(Switch(name, value, change))
    return found


def _figures(config: Config, model: nn.Module, device: str) -> Figures:
    plan = build_plan(model, config)
    footprint = one_rank(plan, foresee(plan, config, device))
    backwards = config.share // config.micro_batch
    reductions = 1 if config.memory.accumulate == "whole" else backwards
    gathered = _sum(plan, EventKind.GATHER, lambda unit: plan.units[unit].gathered_bytes)
    reduced = _sum(plan, EventKind.REDUCE, lambda unit: plan.units[unit].gradient_bytes)
    every = config.memory.checkpoint_every
    return Figures(
        device_bytes=footprint.total - footprint.host,
        host_bytes=footprint.host,
        link_bytes=backwards * gathered + reductions * reduced,
        copied_bytes=backwards * _brought(plan) + reductions * _taken(plan),
        recomputed=config.model.layers // every / config.model.layers if every else 0.0,
    )


def _sum(plan: Plan, kind: EventKind, of_unit: Callable[[int], int]) -> int:
    index = {unit.label: i for i, unit in enumerate(plan.units)}
    return sum(of_unit(index[event.unit]) for event in schedule(plan) if event.kind is kind)


def _brought(plan: Plan) -> int:
    """To the device in one forward and backward."""
    shards = [unit.shard_bytes * (unit.offload is not None) for unit in plan.units]
    once = sum(s for s, unit in zip(shards, plan.units, strict=True) if unit.device_copy_bytes)
    again = _sum(
        plan, EventKind.GATHER, lambda i: shards[i] * (not plan.units[i].device_copy_bytes)
    )
    return once + again


def _taken(plan: Plan) -> int:
    """To the host in one backward."""
    return sum(unit.gradient_shard_bytes for unit in plan.units if unit.offload is not None)
