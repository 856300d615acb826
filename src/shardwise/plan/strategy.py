"""Strategies: what is sharded over the ranks, and what is replicated.

A strategy gives a placement on each mesh axis for parameters (from forward to backward), gradients
and optimizer state. On an axis, each of the three may be sharded only if the next one is::

    parameters  gradients  optimizer
    replicate   replicate  replicate   DDP
    replicate   replicate  shard       ZeRO-1
    replicate   shard      shard       ZeRO-2
    shard       shard      shard       ZeRO-3, FSDP

On a 2-D mesh, the two axes have separate placements: the outer axis, over which the model is
replicated (for example between machines), and the inner one (within a machine).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.spelling import did_you_mean

__all__ = ["PRESETS", "STRATEGIES", "AxisPlacement", "Level", "Strategy", "resolve_strategy"]


class AxisPlacement(StrEnum):
    """How parameters, gradients or optimizer states are placed on a mesh axis."""

    SHARD = "shard"
    REPLICATE = "replicate"


class Level(IntEnum):
    """How much is sharded over one axis: ZeRO's stages."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


Placements = AxisPlacement | str | tuple[AxisPlacement | str, ...]


@dataclass(frozen=True)
class Strategy:
    """A placement for each axis of the mesh: one, or a pair ``(outer, inner)``.

    ``Strategy(parameters="replicate", gradients="shard", optimizer="shard")`` is ZeRO-2, and
    ``Strategy(("replicate", "shard"), ("replicate", "shard"), ("shard", "shard"))`` is HFSDP.

    Raises:
        PlanError: the combination cannot be run, or another one is always better.
    """

    parameters: Placements
    gradients: Placements
    optimizer: Placements
    name: str = "custom"

    def __post_init__(self) -> None:
        rows = [_axes(kind, getattr(self, kind)) for kind in _KINDS]
        if len({len(row) for row in rows}) > 1:
            given = ", ".join(f"{k}={list(r)}" for k, r in zip(_KINDS, rows, strict=True))
            raise PlanError(f"{given}: give each one placement, or each a pair (outer, inner)")
        for kind, row in zip(_KINDS, rows, strict=True):
            object.__setattr__(self, kind, row)
        for axis in range(len(rows[0])):
            _check_axis(self, axis)
        if self.outer > self.inner:
            raise PlanError(
                f"{self}: more is sharded over the outer axis than over the inner one; swap the "
                "dimensions of the mesh and the placements in each pair"
            )

    def __str__(self) -> str:
        return f"strategy {self.name!r}"

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | PathLike[str]) -> "Strategy":
        """The strategy of a DeepSpeed configuration: a mapping, or the path of a JSON file.

        ``shardwise.fsdp.porting.options_from_deepspeed`` reads other options as well.

        Raises:
            PlanError: ``zero_optimization.stage`` is not 0, 1, 2 or 3.
        """
        if not isinstance(config, Mapping):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        assert isinstance(config, Mapping)
        zero = config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        if stage not in range(len(_STAGES)):
            raise PlanError(f"zero_optimization.stage={stage!r}: expected 0, 1, 2 or 3")
        # MiCS replicates stage 3 over groups of that many ranks.
        is_replicated = zero.get("mics_shard_size", -1) > 0
        return PRESETS["hsdp" if is_replicated and stage == len(_STAGES) - 1 else _STAGES[stage]]

    @property
    def num_axes(self) -> int:
        """Dimensions of the mesh that the strategy needs."""
        return len(self.parameters)

    @property
    def inner(self) -> Level:
        return _level(self, -1)

    @property
    def outer(self) -> Level:
        """The level of the outer axis; `Level.NOTHING` without one."""
        return _level(self, 0) if self.num_axes > 1 else Level.NOTHING

    @property
    def is_flat(self) -> bool:
        """Whether both axes have the same placements, so that they act as one."""
        return self.num_axes == 1 or self.outer == self.inner

    @property
    def is_two_level(self) -> bool:
        """Whether shards are divided again over the outer axis."""
        return not self.is_flat and self.outer > Level.NOTHING

    def num_ranks(self, world_size: int, replicas: int) -> int:
        """Ranks of both axes, if ``world_size`` of them share the shards."""
        return world_size * (1 if self.is_two_level else replicas)

    @property
    def shards(self) -> bool:
        """Whether anything is sharded."""
        return self.inner > Level.NOTHING


_WHOLE, _CUT = AxisPlacement.REPLICATE, AxisPlacement.SHARD
_KINDS = tuple(field.name for field in fields(Strategy) if field.name != "name")


def _axes(kind: str, given: Placements) -> tuple[AxisPlacement, ...]:
    several = (given,) if isinstance(given, str) else tuple(given)
    allowed = [placement.value for placement in AxisPlacement]
    if len(several) not in (1, 2) or any(one not in allowed for one in several):
        raise PlanError(
            f"{kind}={given!r}: expected 'shard' or 'replicate', or a pair (outer, inner) of them"
        )
    return tuple(AxisPlacement(one) for one in several)


_REASONS = {
    ("parameters", "gradients"): "a rank would hold whole gradients but only shards of parameters",
    ("gradients", "optimizer"): "whole optimizer states need whole gradients on every rank",
}


def _check_axis(strategy: Strategy, axis: int) -> None:
    for (cut, whole), reason in _REASONS.items():
        if getattr(strategy, cut)[axis] is _CUT and getattr(strategy, whole)[axis] is _WHOLE:
            raise PlanError(
                f"{strategy}: {cut} are sharded over axis {axis} and {whole} replicated: {reason}; "
                f"shard {whole} too, or replicate {cut}"
            )


def _level(strategy: Strategy, axis: int) -> Level:
    return Level(sum(getattr(strategy, kind)[axis] is _CUT for kind in _KINDS))


# ZeRO, Rajbhandari et al., 2019 (arXiv 1910.02054); FSDP and the hybrid of it, Zhao et al., 2023
# (arXiv 2304.11277); the optimizer state over both axes: Megatron-FSDP's HFSDP.
_NONE, _INNER, _BOTH = ("replicate", "replicate"), ("replicate", "shard"), ("shard", "shard")
PRESETS: dict[str, Strategy] = {
    preset.name: preset
    for preset in (
        Strategy("replicate", "replicate", "replicate", "ddp"),
        Strategy("replicate", "replicate", "shard", "zero1"),
        Strategy("replicate", "shard", "shard", "zero2"),
        Strategy("shard", "shard", "shard", "fsdp"),
        Strategy(_INNER, _INNER, _INNER, "hsdp"),
        Strategy(_NONE, _INNER, _INNER, "hsdp-zero2"),
        Strategy(_INNER, _INNER, _BOTH, "hfsdp"),
    )
}

_STAGES = ("ddp", "zero1", "zero2", "fsdp")  # ZeRO's

STRATEGIES: dict[str, Strategy] = PRESETS | {
    "zero3": PRESETS["fsdp"],
    # FSDP1's names
    "NO_SHARD": PRESETS["ddp"],
    "SHARD_GRAD_OP": PRESETS["zero2"],
    "FULL_SHARD": PRESETS["fsdp"],
    "HYBRID_SHARD": PRESETS["hsdp"],
    "_HYBRID_SHARD_ZERO2": PRESETS["hsdp-zero2"],
}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy for a name.

    Raises:
        PlanError: ``STRATEGIES`` has no such name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise PlanError(
            f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}, or a Strategy"
            f"{did_you_mean(strategy, STRATEGIES)}"
        )
    return STRATEGIES[strategy]
