"""From a configuration to the model and to what it is cut into, checked before any rank starts."""

import difflib

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import resolve_strategy
from shardwise.plan.units import Units
from shardwise.train.config import Config
from shardwise.train.data import VOCABULARY, read_corpus
from shardwise.train.models import GPT, Shape

__all__ = [
    "build_model",
    "build_plan",
    "check",
    "find_units",
    "num_shards",
    "offload_of",
    "precision_of",
]


def check(config: Config) -> None:
    """Refuse what would otherwise fail on every rank, seconds later and in many lines.

    Raises:
        ConfigError: the text is missing or too short, or the model cannot be cut as it says.
        PlanError: the strategy or the units do not fit the model.
    """
    read_corpus(config.data).check_holds(config.model.context)
    if config.memory.step_in_backward:
        _check_steps_in_backward(config)
    build_plan(build_model(config), config)


def _check_steps_in_backward(config: Config) -> None:
    """Nothing that needs the gradients of all units, or of all micro batches, before a step."""
    several = config.micro_batch < config.share
    ways_out = {
        "train.grad_clip=0: the norm of all gradients": config.train.grad_clip > 0,
        "precision.compute=bfloat16: the scale of float16": config.precision.compute == "float16",
        "memory.accumulate=whole: gradients of all micro batches": several
        and config.memory.accumulate == "shards",
    }
    for way_out, is_in_the_way in ways_out.items():
        if is_in_the_way:
            setting, _, what = way_out.partition(": ")
            raise ConfigError(
                f"memory.step_in_backward=true: {what} would be known too late; set {setting}"
            )


def build_model(config: Config) -> GPT:
    """The model on the meta device: its values come when it is sharded."""
    shape = Shape(
        vocabulary=VOCABULARY,
        context=config.model.context,
        width=config.model.width,
        layers=config.model.layers,
        heads=config.model.heads,
    )
    with torch.device("meta"):
        model = GPT(shape)
    model.checkpoint_every = config.memory.checkpoint_every
    model.checkpoint = config.memory.checkpoint
    return model


def build_plan(model: nn.Module, config: Config) -> Plan:
    """What goes where, before the model is sharded."""
    return make_plan(
        model,
        world_size=num_shards(config),
        replicas=config.shard.replicas if num_shards(config) > 1 else config.shard.nproc,
        units=find_units(model, config.shard.units),
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        precision=precision_of(config),
        offload=offload_of(config),
    )


def precision_of(config: Config) -> MixedPrecisionPolicy:
    """What ``[precision]`` says."""
    precision = config.precision
    if precision.compute == "float32":
        return MixedPrecisionPolicy(reduce_dtype=_dtype(precision.reduce))
    return MixedPrecisionPolicy(
        param_dtype=_dtype(precision.compute),
        reduce_dtype=_dtype(precision.reduce),
        full_precision=(nn.LayerNorm,) if precision.norms == "float32" else (),
    )


def offload_of(config: Config) -> OffloadPolicy:
    """What ``memory.offload`` says."""
    offload = config.memory.offload
    return NO_OFFLOAD if offload == "none" else CPUOffloadPolicy(parameters=offload == "all")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def num_shards(config: Config) -> int:
    """Into how many parts the strategy cuts the model.

    Raises:
        ConfigError: ``shard.replicas`` does not fit the strategy or the ranks.
        PlanError: there is no such strategy.
    """
    shard = config.shard
    strategy = resolve_strategy(shard.strategy)
    if strategy.num_axes == 1:
        if shard.replicas != 1:
            raise ConfigError(
                f"shard.replicas={shard.replicas}: strategy {shard.strategy!r} has none to choose; "
                "leave it at 1, or use 'hsdp'"
            )
        return shard.nproc if strategy.shards else 1
    if shard.nproc % shard.replicas:
        raise ConfigError(
            f"shard.replicas={shard.replicas} does not divide the {shard.nproc} ranks"
        )
    return shard.nproc if strategy.is_two_level else shard.nproc // shard.replicas


def find_units(model: nn.Module, units: str | int) -> Units:
    """What ``shard.units`` stands for: a name of a class becomes that class.

    Raises:
        ConfigError: no module of the model has such a class.
    """
    if units == "auto" or isinstance(units, int):
        return units
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if units not in classes:
        close = difflib.get_close_matches(units, classes, n=1)
        expected = f"expected auto, a size or one of {', '.join(classes)}"
        hint = f"did you mean {close[0]}?" if close else expected
        raise ConfigError(f"shard.units={units!r}: no module has this class; {hint}")
    return classes[units]
