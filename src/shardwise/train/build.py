"""Builds the model and the plan of a configuration, and forecasts the memory of a rank.

Only `shard_model` needs a process group.
"""

from dataclasses import replace
from functools import partial

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.forecast.memory.step import memory_certificate
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.planned import plan_of, sharding_of
from shardwise.plan.plan import Plan
from shardwise.train.config import Config, MemoryConfig, changed_config
from shardwise.train.data import open_corpus
from shardwise.train.huggingface import HuggingFace
from shardwise.train.optimizer import check_optimizer
from shardwise.train.planned import configuration_of
from shardwise.train.plugins import resolve
from shardwise.train.replicas import check_replicas
from shardwise.train.sinks import check_trackers
from shardwise.train.source import Source, source_of
from shardwise.train.tensor_parallel import TensorRanks, check_tensor_parallel, part_of_rank

__all__ = [
    "build_model",
    "check",
    "check_combinations",
    "forecast_model",
    "memory_of",
    "plan_of_rank",
    "shard_model",
]


def check(config: Config) -> None:
    """Raise a ConfigError or a PlanError if the run cannot start, before any rank is started."""
    check_trackers(config)
    for name in config.run.callbacks:
        resolve("run.callbacks", name, {})
    check_combinations(config)
    source = source_of(config)
    if isinstance(source, HuggingFace):
        source.check_learning_rate()  # before documents are tokenized
    corpus = open_corpus(config)
    corpus.check_length(config.model.context)
    plan_of_rank(config)
    if isinstance(source, HuggingFace):
        source.check_weights()
        source.check_tokenizer(corpus.tokenizer)


def check_combinations(config: Config) -> None:
    """Raise a ConfigError if settings contradict each other; data and model are not looked at."""
    check_optimizer(config.train)
    check_tensor_parallel(config)
    check_replicas(config)
    if config.memory.step_in_backward:
        _check_step_in_backward(config)


def _check_step_in_backward(config: Config) -> None:
    """Raise a ConfigError if a step in backward would need values that are known only later."""
    message = "memory.step_in_backward=true: {} is known only after backward; set {}"
    if config.train.grad_clip > 0:
        raise ConfigError(message.format("the norm of all gradients", "train.grad_clip=0"))
    if config.precision.compute == "float16":
        remedy = "precision.compute=bfloat16"
        raise ConfigError(message.format("the loss scale of float16", remedy))
    # A reproducible run holds whole gradients.
    accumulates = config.num_micro_batches > 1 and not config.train.reproducible
    if accumulates and configuration_of(config).accumulate == "shards":
        remedy = "memory.accumulate=whole"
        raise ConfigError(message.format("the sum over all micro-batches", remedy))


def build_model(config: Config) -> nn.Module:
    return source_of(config).build()


def forecast_model(config: Config, shape: Shape | None = None) -> Model:
    """The model of a run for forecasts, whose `Configuration` says how it is trained.

    Its blocks are neither recomputed nor compiled, and it has no adapters. With a ``shape``, ranks
    can divide it.
    """
    plain = changed_config(config, {"model": {"lora_rank": 0}, "train": {"compile": False}})
    plain = plain.model_copy(update={"memory": MemoryConfig()})
    return Model(config.run.name, shape, factory=partial(build_model, plain))


def plan_of_rank(config: Config) -> Plan:
    return plan_of(part_of_rank(build_model(config), config), configuration_of(config))


def shard_model(model: nn.Module, source: Source, ranks: TensorRanks | None = None) -> None:
    """Shard ``model``, on the meta device, and initialize or load this rank's part.

    ``ranks`` divide its layers; None: each rank has all of them.
    """
    config = source.config
    arguments = sharding_of(configuration_of(config))
    if ranks is not None and ranks.data_mesh is not None:
        arguments |= {"mesh": ranks.data_mesh, "sharding_factor": None}
        ranks.divide(model)
    sw.fully_shard(
        model, **arguments, init=sw.Initialization(config.train.seed, source.filler(model))
    )
    source.load(model)


def memory_of(config: Config, device: str) -> tuple[dict[str, int], dict[str, int]]:
    """Forecast the bytes of a step by use, without activations; see `Certificate.uses`.

    They are those of one rank on ``device`` ("cpu" or "cuda"), and those of one process that holds
    the whole model and neither gathers nor reduces anything.
    """
    configuration = configuration_of(config)
    rank = memory_certificate(plan_of_rank(config), None, configuration, on_cpu=device == "cpu")
    alone = replace(
        configuration,
        strategy="ddp",
        shard_size=1,
        replicas=1,
        tensor=1,
        offload="none",
        offload_step="host",
        reproducible=0,
        accumulate="whole" if configuration.reproducible else configuration.accumulate,
    )
    process = memory_certificate(plan_of(build_model(config), alone), None, alone)
    return rank.uses, {**process.uses, "transient": 0}
