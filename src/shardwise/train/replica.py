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
    for is_conflict, key, remedy in (
        (config.memory.step_in_backward, "memory.step_in_backward=true", "set it to false"),
        (
            config.precision.compute == "float16",
            "precision.compute=float16 skips steps",
            "set precision.compute=bfloat16",
        ),
    ):
        if is_conflict:
            raise ConfigError(f"{key}: replicas synchronize after the optimizer's steps; {remedy}")


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
