"""``shardwise train --memory``: finds the fastest settings of a run within a memory budget."""

from functools import partial

import torch

from shardwise.forecast.configuration import Configuration, Offload
from shardwise.forecast.fit import Search, choose
from shardwise.forecast.machines import local_machine
from shardwise.forecast.models import Model
from shardwise.forecast.numbers import bytes_of
from shardwise.plan.optimizers import plain_options
from shardwise.train.build import build_model
from shardwise.train.config import Config
from shardwise.train.planned import checkpointing_of

__all__ = ["within"]

_OFFLOADS: dict[str, Offload] = {"none": "none", "optimizer": "optimizer", "all": "parameters"}


def within(config: Config, budget: str) -> Config:
    """Return ``config`` with the strategy, prefetch, micro-batch and checkpointing for ``budget``.

    Args:
        config: a configuration with the number of ranks of the run.
        budget: memory of each rank's device, such as "24GB".

    Raises:
        PlanError: nothing fits.
        ConfigError: this GPU is not known.
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
        optimizer=config.train.optimizer,
        optimizer_options=plain_options(config.train.optimizer_options),
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
