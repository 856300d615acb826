"""Builds the optimizer and the learning rate schedule by name."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.errors import ConfigError, PlanError
from shardwise.optim import SOAP, Adam8bit, Muon, parameter_groups
from shardwise.train.config import TrainConfig
from shardwise.train.plugins import resolve

__all__ = ["build_optimizer", "build_scheduler", "check_optimizer", "num_states"]

# Element-wise optimizers, which can update any part of a parameter (Adam8bit: any whole rows).
_OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "adam8bit": Adam8bit,
}
# Optimizers that update hidden matrices as a whole, and all other parameters like AdamW.
_OF_MATRICES: Mapping[str, type[Optimizer]] = {"muon": Muon, "soap": SOAP}
_GROUPING = ("matrices", "others", "split")  # options of `parameter_groups`
# Number of states with the parameter's size; optimizers that are not listed have 2.
_NUM_STATES = {
    "adagrad": 1,
    "adam8bit": 0.5,  # plus a 64th of this for scales
    "muon": 1,  # parameters that AdamW updates have 2
    "rmsprop": 1,
    "sgd": 0,
    "soap": 6,  # for square matrices
}

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

    Raises:
        ConfigError: the optimizer is not known, or does not take its options.
    """
    kind = resolve("train.optimizer", config.optimizer, {**_OPTIMIZERS, **_OF_MATRICES})
    if config.optimizer in _OF_MATRICES:
        return _build_of_matrices(kind, model, config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {}
    if config.optimizer in ("adamw", "adam"):
        options = {"betas": config.betas, "fused": True}
    if config.optimizer == "adam8bit":
        options = {"betas": config.betas}
    options |= config.optimizer_options
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
    resolve("train.schedule", config.schedule, _SCHEDULES)


def num_states(config: TrainConfig) -> float:
    """The number of states per parameter; 2 for an optimizer that is not built in."""
    has_momentum = config.optimizer != "muon" and bool(config.optimizer_options.get("momentum"))
    return _NUM_STATES.get(config.optimizer, 2 - has_momentum) + has_momentum


def build_scheduler(optimizer: Optimizer, config: TrainConfig, *, after: int = 0) -> LambdaLR:
    """A linear warm-up, then ``train.schedule`` to ``final_lr_share`` of ``lr`` at the last step.

    The learning rate depends only on the step, so a resumed run may have other ``steps`` and ``lr``
    than its checkpoint.

    Args:
        optimizer: its learning rates are set to that of step ``after + 1``.
        config: lr, schedule, steps, warmup_share and final_lr_share.
        after: the last completed step.
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
