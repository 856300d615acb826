"""From a configuration to its model, plan and optimizer, and to the memory that they take.

Nothing but `shard_model` needs a process group.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.forecast.memory import step_memory
from shardwise.plan.offload import NO_OFFLOAD
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.strategy import resolve_strategy
from shardwise.plan.units import Units
from shardwise.train.config import Config, TrainConfig
from shardwise.train.data import VOCABULARY, open_corpus
from shardwise.train.model import GPT, Shape
from shardwise.train.sinks import check_trackers

__all__ = [
    "Footprint",
    "build_model",
    "build_optimizer",
    "build_plan",
    "build_scheduler",
    "check",
    "process_footprint",
    "rank_footprint",
    "shard_model",
]

ADAMW_STATES = 2  # the running means of the gradient and of its square


def check(config: Config) -> None:
    """Find errors in the configuration before any rank is started.

    Raises:
        ConfigError: the text is missing or too short, a package is missing, or keys conflict.
        PlanError: the strategy or the units do not fit the model.
    """
    check_trackers(config)
    open_corpus(config.data).check_holds(config.model.context)
    if config.memory.step_in_backward:
        _check_step_in_backward(config)
    build_plan(build_model(config), config)


def _check_step_in_backward(config: Config) -> None:
    """A step in backward cannot use the gradients of all units, or of all micro batches."""
    adds_shards = config.accumulates and config.memory.accumulate == "shards"
    for is_conflict, what, way_out in (
        (config.train.grad_clip > 0, "the norm of all gradients", "train.grad_clip=0"),
        (
            config.precision.compute == "float16",
            "the loss scale of float16",
            "precision.compute=bfloat16",
        ),
        (adds_shards, "the sum over all micro batches", "memory.accumulate=whole"),
    ):
        if is_conflict:
            raise ConfigError(
                f"memory.step_in_backward=true: {what} is known only after backward; set {way_out}"
            )


def build_model(config: Config) -> GPT:
    """The model on the meta device; its values are initialized when it is sharded."""
    with torch.device("meta"):
        model = GPT(Shape(vocabulary=VOCABULARY, **config.model.model_dump()))
    model.checkpoint_every = config.memory.checkpoint_every
    model.checkpoint = config.memory.checkpoint
    return model


def build_plan(model: nn.Module, config: Config) -> Plan:
    """The plan that `fully_shard` will make of ``model``."""
    num_shards = _num_shards(config)
    return make_plan(
        model,
        world_size=num_shards,
        replicas=config.shard.replicas if num_shards > 1 else config.shard.nproc,
        units=_find_units(model, config.shard.units),
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        precision=_precision_policy(config),
        offload=_offload_policy(config),
    )


def shard_model(model: GPT, config: Config) -> None:
    """Shard ``model``, and initialize this rank's part of it."""
    sw.fully_shard(
        model,
        units=_find_units(model, config.shard.units),
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        mp_policy=_precision_policy(config),
        offload_policy=_offload_policy(config),
        sharding_factor=config.shard.nproc // config.shard.replicas,
        init=sw.Initialization(config.train.seed, model.fill),
    )


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW with weight decay for matrices alone; a sharded parameter keeps its ``ndim``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, *, after: int = 0
) -> LambdaLR:
    """Linear warm-up, then cosine decay to ``final_lr_share`` of ``lr`` at the last step.

    The rate is a function of the step alone, so a resumed run may have other ``steps`` and ``lr``
    than its checkpoint.

    Args:
        optimizer: whose rates are set to that of step ``after + 1``.
        config: lr, steps, warmup_steps and final_lr_share.
        after: the last step that is done.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr
    return LambdaLR(optimizer, partial(_lr_factor, config), last_epoch=after - 1)


def _lr_factor(config: TrainConfig, done: int) -> float:
    step = min(done + 1, config.steps)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.final_lr_share + (1 - config.final_lr_share) * cosine


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a step without activations, which sharding does not change."""

    parameters: int
    gradients: int
    optimizer: int
    transient: int  # gathered units and gradients that are being reduced, at the peak
    host: int = 0  # part of the above, offloaded to the host

    @property
    def total(self) -> int:
        """An upper bound of the peak: the last gradients exist when less is transient."""
        return self.parameters + self.gradients + self.optimizer + self.transient


def process_footprint(plan: Plan) -> Footprint:
    """One process that holds the whole model."""
    states = ADAMW_STATES * plan.gradient_bytes
    return Footprint(plan.parameter_bytes, plan.gradient_bytes, states, transient=0)


def rank_footprint(plan: Plan, config: Config, device: str) -> Footprint:
    """The forecast for one rank on ``device``, "cpu" or "cuda"."""
    whole = config.memory.accumulate == "whole"
    memory = step_memory(
        plan,
        accumulates=config.accumulates and not whole,
        unreduced=config.accumulates and whole,
        steps_in_backward=config.memory.step_in_backward,
        on_cpu=device == "cpu",
    )
    states_on_host = ADAMW_STATES * sum(
        unit.gradient_shard_bytes for unit in plan.units if unit.offload is not None
    )
    return Footprint(
        parameters=plan.shard_bytes + sum(unit.device_copy_bytes for unit in plan.units),
        gradients=memory.gradient_bytes,
        optimizer=ADAMW_STATES * plan.gradient_shard_bytes,
        transient=memory.transient_bytes,
        host=memory.host_bytes + states_on_host,
    )


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


def _find_units(model: nn.Module, units: str | int) -> Units:
    """The value of ``shard.units``, with the name of a class replaced by the class."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    return classes.get(units, units) if isinstance(units, str) else units
