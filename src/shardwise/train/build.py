"""Builds the model and the plan of a configuration, and forecasts the memory of a rank.

Only `shard_model` needs a process group.
"""

from dataclasses import replace

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.forecast.certificate import memory_certificate
from shardwise.forecast.planned import plan_of, sharding_of
from shardwise.train.config import Config
from shardwise.train.data import open_corpus
from shardwise.train.optimizer import check_optimizer
from shardwise.train.planned import configuration_of
from shardwise.train.replicas import check_replicas
from shardwise.train.sinks import check_trackers
from shardwise.train.source import Source, source_of

__all__ = ["build_model", "check", "memory_of", "shard_model"]


def check(config: Config) -> None:
    """Find errors in the configuration before any rank is started.

    Raises:
        ConfigError: the text is missing or too short, a package is missing, or keys conflict.
        PlanError: the strategy or the units do not fit the model.
    """
    check_trackers(config)
    check_optimizer(config.train)
    open_corpus(config).check_length(config.model.context)
    if config.train.reproducible and config.replicas.lighthouse:
        raise ConfigError(
            f"train.reproducible={config.train.reproducible} with [replicas]: which replicas take "
            "part in a step is not reproducible; set train.reproducible=0"
        )
    check_replicas(config)
    if config.memory.step_in_backward:
        _check_step_in_backward(config)
    plan_of(build_model(config), configuration_of(config))


def _check_step_in_backward(config: Config) -> None:
    """Raise a ConfigError if a step in backward would need values that are known only later."""
    message = "memory.step_in_backward=true: {} is known only after backward; set {}"
    if config.train.grad_clip > 0:
        raise ConfigError(message.format("the norm of all gradients", "train.grad_clip=0"))
    if config.precision.compute == "float16":
        remedy = "precision.compute=bfloat16"
        raise ConfigError(message.format("the loss scale of float16", remedy))
    holds_whole = config.memory.accumulate == "whole" or config.train.reproducible
    if config.accumulates and not holds_whole:
        remedy = "memory.accumulate=whole"
        raise ConfigError(message.format("the sum over all micro-batches", remedy))


def build_model(config: Config) -> nn.Module:
    """The model on the meta device; its values are initialized when it is sharded."""
    return source_of(config).build()


def shard_model(model: nn.Module, source: Source) -> None:
    """Shard the ``model`` of ``source``, and initialize or load this rank's part."""
    config = source.config
    sw.fully_shard(
        model,
        **sharding_of(configuration_of(config)),
        reproducible=config.train.reproducible or None,
        init=sw.Initialization(config.train.seed, source.filler(model)),
    )
    source.load(model)


def memory_of(config: Config, device: str) -> tuple[dict[str, int], dict[str, int]]:
    """Forecast the bytes of a step by use, without activations; see `Certificate.uses`.

    Args:
        config: the configuration of the run.
        device: where ranks compute, "cpu" or "cuda".

    Returns:
        The bytes of one rank, and those of one process that holds the whole model and neither
        gathers nor reduces anything.
    """
    model, configuration = build_model(config), configuration_of(config)
    plan = plan_of(model, configuration)
    rank = memory_certificate(plan, None, configuration, on_cpu=device == "cpu")
    alone = replace(configuration, strategy="ddp", shard_size=1, replicas=1, offload="none")
    process = memory_certificate(plan_of(model, alone), None, alone)
    return rank.uses, {**process.uses, "transient": 0}
