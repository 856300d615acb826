"""Makes a run one of several replicas, as [outer] configures it."""

import re
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.train.config import Config

__all__ = ["check_outer", "outer_of"]


def check_outer(config: Config) -> None:
    """Raise a ConfigError if keys of [outer] are invalid, or conflict with others."""
    outer = config.outer
    if not outer.hub:
        return
    if not re.fullmatch(r".+:\d+", outer.hub):
        raise ConfigError(f"outer.hub={outer.hub!r}: expected host:port")
    try:
        _outer_settings(config)
    except PlanError as error:
        raise ConfigError(f"[outer]: {error}") from None
    reason = "replicas synchronize after the optimizer's steps"
    if config.memory.step_in_backward:
        raise ConfigError(f"memory.step_in_backward=true: {reason}; set it to false")
    if config.precision.compute == "float16":
        key, remedy = "precision.compute=float16", "set precision.compute=bfloat16"
        raise ConfigError(f"{key} skips steps: {reason}; {remedy}")


def outer_of(model: nn.Module, optimizer: Optimizer, config: Config) -> sw.OuterOptimizer | None:
    """The outer optimizer that synchronizes the replicas; None if this is the only replica."""
    outer = config.outer
    if not outer.hub:
        return None
    return sw.outer_optimizer(
        model,
        optimizer,
        _outer_settings(config),
        hub=outer.hub,
        replica=outer.replica,
        num_replicas=outer.replicas,
    )


def _outer_settings(config: Config) -> sw.Outer:
    keys = ("every", "fragments", "delay", "dtype", "block", "mixing", "deadline")
    momentum = config.outer.momentum
    return sw.Outer(
        **{key: getattr(config.outer, key) for key in keys},
        optimizer=partial(
            torch.optim.SGD, lr=config.outer.lr, momentum=momentum, nesterov=momentum > 0
        ),
    )
