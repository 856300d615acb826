"""``shardwise train --memory``: finds the fastest settings of a run within a memory budget."""

from dataclasses import replace

import torch

from shardwise.errors import ConfigError
from shardwise.forecast.machines.find import local_machine
from shardwise.forecast.options import bytes_of
from shardwise.forecast.search.fit import Search, choose
from shardwise.train.build import forecast_model
from shardwise.train.config import Config, changed_config
from shardwise.train.planned import config_of, configuration_of

__all__ = ["within"]


def within(config: Config, budget: str) -> Config:
    """Return ``config`` with the strategy, prefetch, micro-batch and checkpointing for ``budget``.

    ``config`` has the number of ranks of the run; ``budget`` is the memory of each, such as "24GB".
    Raise a PlanError if nothing fits.
    """
    degree = config.shard.tensor
    if degree > 1:
        raise ConfigError(
            f"--memory {budget}: it does not search with shard.tensor={degree}; write a file with "
            f"`shardwise plan FILE.toml --tensor {degree} --config PLAN.toml` instead"
        )
    plain = changed_config(
        config,
        {
            "shard": {"strategy": "fsdp", "replicas": 1},
            "train": {"micro_batch": 0},
            "memory": {"checkpoint_every": 0, "activations": "device", "accumulate": "shards"},
        },
    )
    search = Search(
        forecast_model(plain),
        local_machine(config.shard.nproc),
        on_cpu=not torch.cuda.is_available(),
    )
    found = choose(search, configuration_of(plain), bytes_of(budget, "--memory "), whole=True)
    modes = set(found.checkpointing)
    uniform = replace(found.configuration, checkpointing=modes.pop() if modes else "none")
    return config_of(uniform, plain)
