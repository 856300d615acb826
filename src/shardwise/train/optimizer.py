"""Builds the optimizer and the learning rate schedule by name."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.errors import ConfigError, PlanError
from shardwise.optim import Muon, parameter_groups
from shardwise.plan.optimizers import OPTIMIZERS, OptimizerSpec, optimizer_spec
from shardwise.plan.spelling import expected_one_of
from shardwise.train.config import TrainConfig
from shardwise.train.plugins import resolve

__all__ = ["build_optimizer", "build_scheduler", "check_optimizer", "spec_of"]

_GROUPING = ("matrices", "others", "split")  # options of `parameter_groups`
# Functions of the progress after the warm-up (0 to 1), with values that fall from 1 to 0.
_SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda _progress: 1.0,
    "wsd": lambda progress: min(1.0, 5 * (1 - progress)),  # stable, then a decay in the last fifth
}


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Build ``train.optimizer``, with weight decay for matrices only.

    This works on shards because a sharded parameter keeps its ``ndim``. With "muon" and "soap",
    ``optimizer_options`` may also contain the options of `shardwise.optim.parameter_groups`.
    """
    spec = spec_of(config)
    kind = resolve("train.optimizer", spec.path, {})
    for name in ("lr",) if spec.has_owners else ("lr", "weight_decay"):
        if name in config.optimizer_options:  # the schedule, or the groups, would override it
            raise ConfigError(
                f"train.optimizer_options: set train.{name} instead of {name!r} in it"
            )
    if spec.has_owners:
        return _build_of_matrices(kind, model, config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"betas": config.betas} if spec.takes_betas else {}
    options |= {"fused": True} if spec.is_fusable else {}
    options |= dict(spec.options) | config.optimizer_options
    try:
        optimizer: Optimizer = kind([g for g in groups if g["params"]], lr=config.lr, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.optimizer_options={options}: {error}") from None
    return optimizer


def _build_of_matrices(kind: type[Optimizer], model: nn.Module, config: TrainConfig) -> Optimizer:
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if kind is Muon:  # with this adjustment, one learning rate suits matrices and AdamW's part
        options |= {"adjust_lr_fn": "match_rms_adamw", "betas": config.betas}
    options |= config.optimizer_options
    grouping = {key: options.pop(key) for key in _GROUPING if key in options}
    try:
        return kind(parameter_groups(model, **grouping), **options)
    except (PlanError, TypeError, ValueError) as error:
        raise ConfigError(f"train.optimizer_options={config.optimizer_options}: {error}") from None


def check_optimizer(config: TrainConfig) -> None:
    """Raise a ConfigError if the optimizer or the schedule cannot be built."""
    options = {k: v for k, v in config.optimizer_options.items() if k not in _GROUPING}
    build_optimizer(nn.Linear(1, 1), config.model_copy(update={"optimizer_options": options}))
    _check_schedule(config)


def _check_schedule(config: TrainConfig) -> None:
    schedule = resolve("train.schedule", config.schedule, _SCHEDULES)
    for done in (config.warmup_steps, config.steps - 1):  # before its first and its last step
        try:
            factor = float(_lr_factor(config, schedule, done))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"train.schedule={config.schedule!r}: {error}") from None
        if not 0 <= round(factor, 9) < math.inf:
            raise ConfigError(
                f"train.schedule={config.schedule!r}: the learning rate of step {done + 1} would "
                f"be {factor:.3g} * train.lr; expected 0 or more"
            )


def spec_of(config: TrainConfig) -> OptimizerSpec:
    """The optimizer with its options; a ConfigError if it is unknown or needs whole parameters."""
    name = config.optimizer
    known = [one.name for one in OPTIMIZERS.values() if one.path]
    if name not in known and ":" not in name:
        reason = "there is no class that works on shards; " if name in OPTIMIZERS else ""
        raise ConfigError(
            f"train.optimizer={name!r}: {reason}{expected_one_of(known, name)}, "
            "or package.module:Class"
        )
    return optimizer_spec(name, config.optimizer_options)


def build_scheduler(optimizer: Optimizer, config: TrainConfig, *, after: int = 0) -> LambdaLR:
    """A linear warm-up, then ``train.schedule`` to ``final_lr_share`` of ``lr`` at the last step.

    The learning rate depends only on the step, so a resumed run may have other ``steps`` and ``lr``
    than its checkpoint. That of step ``after + 1`` is set.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr
    schedule = resolve("train.schedule", config.schedule, _SCHEDULES)
    return LambdaLR(optimizer, partial(_lr_factor, config, schedule), last_epoch=after - 1)


def _lr_factor(config: TrainConfig, schedule: Callable[[float], float], done: int) -> float:
    step = min(done + 1, config.steps)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.final_lr_share + (1 - config.final_lr_share) * schedule(progress)
