"""``shardwise train --memory``: finds the fastest settings of a run within a memory budget."""

from functools import partial

import torch

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration, Offload, Optimizer
from shardwise.forecast.fit import Search, choose
from shardwise.forecast.machines import local_machine
from shardwise.forecast.models import Model
from shardwise.forecast.numbers import bytes_of
from shardwise.train.build import build_model
from shardwise.train.config import Config, TrainConfig
from shardwise.train.planned import checkpointing_of

__all__ = ["optimizer_of", "within"]

_OFFLOADS: dict[str, Offload] = {"none": "none", "optimizer": "optimizer", "all": "parameters"}
_OPTIMIZERS: dict[str, Optimizer] = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}


def within(config: Config, budget: str) -> Config:
    """Return ``config`` with the strategy, prefetch, micro-batch and checkpointing for ``budget``.

    Args:
        config: a configuration with the number of ranks of the run.
        budget: memory of each rank's device, such as "24GB".

    Raises:
        PlanError: nothing fits.
        ConfigError: the memory of the optimizer, or this GPU, is not known.
    """
    memory = {"checkpoint_every": 0, "activations": "device", "accumulate": "shards"}
    plain = config.model_copy(update={"memory": config.memory.model_copy(update=memory)})
    base = Configuration(
        shard_size=config.shard.nproc,
        micro_batch=config.rank_batch,
        sequence=config.model.context,
        compute_dtype=getattr(torch, config.precision.compute),
        reduce_dtype=getattr(torch, config.precision.reduce),
        offload=_OFFLOADS[config.memory.offload],
        optimizer=optimizer_of(config.train, budget),
    )
    search = Search(
        Model(config.run.name, factory=partial(build_model, plain)),
        local_machine(config.shard.nproc),
        on_cpu=not torch.cuda.is_available(),
    )
    found = choose(search, base, bytes_of(budget), whole=True).configuration
    shard = {"strategy": found.strategy, "prefetch": found.prefetch, "replicas": 1}
    return config.model_copy(
        update={
            "shard": config.shard.model_copy(update=shard),
            "train": config.train.model_copy(update={"micro_batch": found.micro_batch}),
            "memory": config.memory.model_copy(update=memory | checkpointing_of(found)),
        }
    )


def optimizer_of(config: TrainConfig, budget: str) -> Optimizer:
    """The forecast's name of ``config.optimizer``; raises a ConfigError if it has none."""
    if config.optimizer not in _OPTIMIZERS:
        raise ConfigError(
            f"--memory {budget}: the memory of train.optimizer={config.optimizer!r} is not "
            f"known; expected one of {', '.join(_OPTIMIZERS)}"
        )
    if config.optimizer == "sgd" and config.optimizer_options.get("momentum"):
        return "sgd_momentum"
    return _OPTIMIZERS[config.optimizer]
