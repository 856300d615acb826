"""Translates a trainer's configuration to that of a forecast, and back."""

from dataclasses import fields, replace
from typing import Any

import tomli_w
import torch

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Checkpointing, Configuration, Offload
from shardwise.optim.outer import Outer
from shardwise.plan.optimizers import plain_options
from shardwise.plan.strategy import resolve_strategy
from shardwise.train.config import Config, MemoryConfig, ShardConfig, changed_config
from shardwise.train.model import modes_of
from shardwise.train.optimizer import spec_of
from shardwise.train.source import source_of
from shardwise.train.tensor_parallel import check_tensor_parallel

__all__ = ["averaged_replicas", "config_of", "configuration_of", "shared_settings", "toml_of"]

_OFFLOADS: dict[str, Offload] = {"none": "none", "optimizer": "optimizer", "all": "parameters"}


def configuration_of(config: Config) -> Configuration:
    """Return how ``config`` trains; raise a ConfigError if that is impossible."""
    spec = spec_of(config.train)
    shard_size, replicas = _sizes(config)
    return Configuration(
        strategy=config.shard.strategy,
        shard_size=shard_size,
        replicas=replicas,
        tensor=config.shard.tensor,
        # Plans of transformers divide products only, and gather the logits for the loss.
        sequence_parallel=config.shard.tensor == 1,
        split_vocabulary=config.shard.tensor == 1,
        prefetch=config.shard.prefetch,
        units=config.shard.units,
        micro_batch=config.micro_batch,
        accumulation=config.num_micro_batches,
        accumulate=config.memory.accumulate,
        reproducible=config.train.reproducible,
        sequence=config.model.context,
        checkpointing=_checkpointing(config),
        activation_offload=config.memory.activations == "host",
        offload=_OFFLOADS[config.memory.offload],
        offload_step=config.memory.offload_step,
        compute_dtype=getattr(torch, config.precision.compute),
        reduce_dtype=getattr(torch, config.precision.reduce),
        full_norms=config.precision.norms == "float32" and config.precision.compute != "float32",
        optimizer=config.train.optimizer,
        optimizer_options=plain_options(config.train.optimizer_options),
        optimizer_loop=spec.loop,
        step_in_backward=config.memory.step_in_backward,
        clips=config.train.grad_clip > 0,
        compiled=config.train.compile,
        adapters=_adapters(config),
        outer=_outer(config),
        outer_replicas=config.replicas.count if config.outer.every else 1,
    )


def shared_settings(config: Config) -> Configuration:
    """Return how ``config`` trains, on one rank and with the defaults of all that a search varies.

    It varies the ranks, the strategy, the prefetch, the batch of a rank, checkpointing and offload.
    """
    kept = config.memory.model_dump(include={"step_in_backward", "accumulate"})
    changes = {
        "shard": ShardConfig(nproc=1, units=config.shard.units),
        "train": config.train.model_copy(update={"micro_batch": 0}),
        "memory": MemoryConfig(**kept),
    }
    found = configuration_of(config.model_copy(update=changes))
    return replace(found, micro_batch=1, accumulation=1)


def config_of(configuration: Configuration, base: Config) -> Config:
    """Return ``base`` changed so that it trains as ``configuration``.

    A ConfigError says what the trainer lacks if it cannot.
    """
    if configuration.tensor == 1:  # these two say nothing
        configuration = replace(configuration, sequence_parallel=True, split_vocabulary=True)
    try:
        config = _changed(configuration, base)
        check_tensor_parallel(config)
        found = configuration_of(config)
    except ShardwiseError as error:
        raise ConfigError(f"shardwise train: {error}") from None
    lacking = [
        f"{field.name}={_shown(getattr(configuration, field.name))}"
        for field in fields(Configuration)
        if getattr(found, field.name) != getattr(configuration, field.name)
    ]
    if lacking:
        raise ConfigError(f"shardwise train cannot train with {', '.join(lacking)}")
    return config


def toml_of(config: Config) -> str:
    """Return ``config`` as TOML, without keys that have their defaults."""
    document = config.model_dump(exclude_defaults=True)
    if "lr" in config.train.model_fields_set:  # a run that loads weights needs it
        document.setdefault("train", {})["lr"] = config.train.lr
    return tomli_w.dumps(document)


def _changed(configuration: Configuration, base: Config) -> Config:
    modes = configuration.checkpointing
    mode = modes if isinstance(modes, str) else modes[0]
    is_same = base.train.optimizer == configuration.optimizer
    kept = base.train.optimizer_options if is_same else {}
    offload = next(key for key, value in _OFFLOADS.items() if value == configuration.offload)
    changes: dict[str, dict[str, Any]] = {
        "model": {"context": configuration.sequence, **_lora(configuration.adapters)},
        "train": {
            "global_batch": configuration.global_batch * averaged_replicas(base),
            "micro_batch": configuration.micro_batch,
            "reproducible": configuration.reproducible,
            "compile": configuration.compiled,
            "optimizer": configuration.optimizer,
            "optimizer_options": {**kept, **dict(configuration.optimizer_options)},
            "grad_clip": (base.train.grad_clip or 1.0) * configuration.clips,
        },
        "shard": {
            "nproc": configuration.data_parallel * configuration.tensor,
            "tensor": configuration.tensor,
            "units": "auto" if configuration.units is None else configuration.units,
            "strategy": configuration.strategy,
            "replicas": configuration.replicas if configuration.row.num_axes > 1 else 1,
            "prefetch": configuration.prefetch,
        },
        "precision": {
            "compute": _name(configuration.compute_dtype),
            "reduce": _name(configuration.reduce_dtype),
            "norms": _norms(configuration, base),
        },
        "memory": {
            "checkpoint_every": int(mode != "none"),
            "checkpoint": _checkpoint(mode, base.memory),
            "activations": "host" if configuration.activation_offload else "device",
            "offload": offload,
            "offload_step": configuration.offload_step,
            "step_in_backward": configuration.step_in_backward,
            "accumulate": configuration.accumulate,
        },
    }
    return changed_config(base, changes)


def averaged_replicas(config: Config) -> int:
    """The number of replicas that average gradients, of which a `Configuration` is one."""
    return 1 if config.outer.every else config.replicas.count


def _checkpoint(mode: str, base: MemoryConfig) -> str:
    """Return the name of a mode, in the implementation of ``base`` if that recomputes blocks."""
    if mode == "none":
        return MemoryConfig().checkpoint
    is_reentrant = base.checkpoint_every and base.checkpoint == "reentrant"
    return "reentrant" if mode == "full" and is_reentrant else mode


def _outer(config: Config) -> Outer | None:
    if not config.outer.every or config.replicas.count == 1:
        return None
    return Outer(**config.outer.model_dump(exclude={"lr", "momentum"}))


def _adapters(config: Config) -> Adapters | None:
    model = config.model
    if not model.lora_rank:
        return None
    return Adapters(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)


def _lora(adapters: Adapters | None) -> dict[str, Any]:
    if adapters is None:
        return {"lora_rank": 0}
    return {
        "lora_rank": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_targets": adapters.targets,
    }


def _norms(configuration: Configuration, base: Config) -> str:
    if configuration.compute_dtype == torch.float32:
        return base.precision.norms
    return "float32" if configuration.full_norms else "compute"


def _checkpointing(config: Config) -> Checkpointing | tuple[Checkpointing, ...]:
    memory = config.memory
    if not memory.checkpoint_every:
        return "none"
    mode: Any = "full" if memory.checkpoint == "reentrant" else memory.checkpoint
    if memory.checkpoint_every == 1:
        return mode  # type: ignore[no-any-return] # one of the modes of `Checkpointing`
    modes = modes_of(memory, source_of(config).num_layers)
    return tuple("none" if one == "none" else mode for one in modes)


def _sizes(config: Config) -> tuple[int, int]:
    """Return the number of shards of the model, and of replicas of them."""
    shard, num_ranks = config.shard, config.data_ranks
    strategy = resolve_strategy(shard.strategy)
    if strategy.num_axes == 1:
        if shard.replicas != 1:
            raise ConfigError(
                f"shard.replicas={shard.replicas}: strategy {shard.strategy!r} has no replicas; "
                "set it to 1, or use 'hsdp'"
            )
        return (num_ranks, 1) if strategy.shards else (1, num_ranks)
    if num_ranks % shard.replicas:
        ranks = "ranks" if shard.tensor == 1 else f"groups of {shard.tensor} ranks"
        raise ConfigError(
            f"shard.replicas={shard.replicas} does not divide the {num_ranks} {ranks}"
        )
    return num_ranks // shard.replicas, shard.replicas


def _shown(value: Any) -> str:
    return _name(value) if isinstance(value, torch.dtype) else str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
