"""Builds the model and the plan of a configuration, and forecasts the memory of a rank.

Only `shard_model` needs a process group.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.forecast.memory import step_memory
from shardwise.plan.offload import NO_OFFLOAD
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.strategy import resolve_strategy
from shardwise.train.config import Config
from shardwise.train.data import open_corpus
from shardwise.train.optimizer import check_optimizer, num_states
from shardwise.train.replicas import check_replicas
from shardwise.train.sinks import check_trackers
from shardwise.train.source import Source, source_of

__all__ = [
    "Footprint",
    "build_model",
    "build_plan",
    "check",
    "process_footprint",
    "rank_footprint",
    "shard_model",
]


def check(config: Config) -> None:
    """Find errors in the configuration before any rank is started.

    Raises:
        ConfigError: the text is missing or too short, a package is missing, or keys conflict.
        PlanError: the strategy or the units do not fit the model.
    """
    check_trackers(config)
    check_optimizer(config.train)
    open_corpus(config).check_length(config.model.context)
    check_replicas(config)
    if config.memory.step_in_backward:
        _check_step_in_backward(config)
    build_plan(build_model(config), config)


def _check_step_in_backward(config: Config) -> None:
    """Raise a ConfigError if a step in backward would need values that are known only later."""
    message = "memory.step_in_backward=true: {} is known only after backward; set {}"
    if config.train.grad_clip > 0:
        raise ConfigError(message.format("the norm of all gradients", "train.grad_clip=0"))
    if config.precision.compute == "float16":
        remedy = "precision.compute=bfloat16"
        raise ConfigError(message.format("the loss scale of float16", remedy))
    if config.accumulates and config.memory.accumulate == "shards":
        remedy = "memory.accumulate=whole"
        raise ConfigError(message.format("the sum over all micro-batches", remedy))


def build_model(config: Config) -> nn.Module:
    """The model on the meta device; its values are initialized when it is sharded."""
    return source_of(config).build()


def build_plan(model: nn.Module, config: Config) -> Plan:
    """The plan that `fully_shard` makes for ``model``."""
    num_shards = _num_shards(config)
    return make_plan(
        model,
        world_size=num_shards,
        replicas=config.shard.replicas if num_shards > 1 else config.shard.nproc,
        units=config.shard.units,
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        precision=_precision_policy(config),
        offload=_offload_policy(config),
        granularity=_granularity(config),
    )


def shard_model(model: nn.Module, source: Source) -> None:
    """Shard the ``model`` of ``source``, and initialize or load this rank's part."""
    config = source.config
    sw.fully_shard(
        model,
        units=config.shard.units,
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        mp_policy=_precision_policy(config),
        offload_policy=_offload_policy(config),
        granularity=_granularity(config),
        sharding_factor=config.shard.nproc // config.shard.replicas,
        init=sw.Initialization(config.train.seed, source.filler(model)),
    )
    source.load(model)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a step, without activations, which do not depend on sharding."""

    parameters: int
    gradients: int
    optimizer: int
    transient: int  # peak bytes of gathered units and of gradients that are being reduced
    host: int = 0  # bytes of the above that are offloaded to the host

    @property
    def total(self) -> int:
        """An upper bound of the peak: once all gradients exist, ``transient`` is past its peak."""
        return self.parameters + self.gradients + self.optimizer + self.transient


def process_footprint(plan: Plan, config: Config) -> Footprint:
    """The bytes of one process that holds the whole model."""
    states = int(num_states(config.train) * plan.gradient_bytes)
    return Footprint(plan.parameter_bytes, plan.gradient_bytes, states, transient=0)


def rank_footprint(plan: Plan, config: Config, device: str) -> Footprint:
    """A forecast of the bytes of one rank on ``device``, "cpu" or "cuda"."""
    whole = config.memory.accumulate == "whole"
    memory = step_memory(
        plan,
        accumulates=config.accumulates and not whole,
        num_unreduced=(config.num_micro_batches - 1) * whole,
        steps_in_backward=config.memory.step_in_backward,
        on_cpu=device == "cpu",
    )
    states = num_states(config.train)
    offloaded = (unit.gradient_shard_bytes for unit in plan.units if unit.offload is not None)
    states_on_host = int(states * sum(offloaded))
    return Footprint(
        parameters=plan.shard_bytes + sum(unit.device_copy_bytes for unit in plan.units),
        gradients=memory.gradient_bytes,
        optimizer=int(states * plan.gradient_shard_bytes),
        transient=memory.transient_bytes,
        host=memory.host_bytes + states_on_host,
    )


def _granularity(config: Config) -> Literal["element", "row"]:
    """Rows for optimizers with 8-bit states, whose blocks must not cross rows."""
    return "row" if config.train.optimizer == "adam8bit" else "element"


def _precision_policy(config: Config) -> sw.MixedPrecisionPolicy:
    precision = config.precision
    reduce_dtype = getattr(torch, precision.reduce)
    if precision.compute == "float32":
        return sw.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    return sw.MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=reduce_dtype,
        full_precision=(nn.LayerNorm,),
    )


def _offload_policy(config: Config) -> sw.OffloadPolicy:
    offload = config.memory.offload
    return NO_OFFLOAD if offload == "none" else sw.CPUOffloadPolicy(parameters=offload == "all")


def _num_shards(config: Config) -> int:
    shard = config.shard
    strategy = resolve_strategy(shard.strategy)
    if strategy.num_axes == 1:
        if shard.replicas != 1:
            raise ConfigError(
                f"shard.replicas={shard.replicas}: strategy {shard.strategy!r} has no replicas; "
                "set it to 1, or use 'hsdp'"
            )
        return shard.nproc if strategy.shards else 1
    if shard.nproc % shard.replicas:
        raise ConfigError(
            f"shard.replicas={shard.replicas} does not divide the {shard.nproc} ranks"
        )
    return shard.nproc if strategy.is_two_level else shard.nproc // shard.replicas
