"""Converts the configuration that a search has chosen to a file for `shardwise train`."""

from typing import Any

import tomli_w
import torch

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.transformer import Shape
from shardwise.train.config import Config

__all__ = ["checkpointing_of", "config_of"]

_OFFLOAD = {"none": "none", "optimizer": "optimizer", "parameters": "all"}


def config_of(configuration: Configuration, shape: Shape | None, path: str = "") -> str:
    """Return TOML for `shardwise train`, without keys that have their defaults.

    The model is that of the directory ``path``, or a GPT with the layers, heads and width of
    ``shape``. Comments list what the trainer does not support: model parallelism, shards in 16
    bits, torch.compile.
    """
    values: dict[str, dict[str, Any]] = {
        "train": {
            "global_batch": configuration.global_batch,
            "micro_batch": configuration.micro_batch,
        },
        "shard": {
            "nproc": configuration.data_parallel * configuration.context,
            "strategy": configuration.strategy,
            "replicas": configuration.replicas if configuration.row.num_axes > 1 else 1,
            "prefetch": configuration.prefetch,
        },
        "precision": {
            "compute": _name(configuration.compute_dtype),
            "reduce": _name(configuration.reduce_dtype),
        },
        "memory": {
            **checkpointing_of(configuration),
            "offload": _OFFLOAD[configuration.offload],
        },
    }
    if path:
        values["model"] = {"path": path, "context": configuration.sequence}
    elif shape is not None and shape.hidden % (2 * shape.heads) == 0:
        values["model"] = {
            "layers": shape.layers,
            "heads": shape.heads,
            "width": shape.hidden,
            "context": configuration.sequence,
        }
    Config.model_validate(values)  # raises if the trainer does not accept a value
    comments = "".join(f"# {line}\n" for line in _differences(configuration))
    return comments + tomli_w.dumps(values)


def checkpointing_of(configuration: Configuration) -> dict[str, Any]:
    """The keys of [memory] about activations; the mode of the first block applies to all."""
    modes = configuration.checkpointing
    mode = modes if isinstance(modes, str) else modes[0]
    return {
        "checkpoint_every": int(mode != "none"),
        "checkpoint": "full" if mode in ("none", "full") else "selective",
        "activations": "host" if configuration.activation_offload else "device",
    }


def _differences(configuration: Configuration) -> list[str]:
    found = []
    if configuration.model_parallel > configuration.context:
        found.append("The trainer has no tensor or pipeline parallelism: ranks are data-parallel.")
    if configuration.context > 1:
        found.append("The trainer has no context parallelism.")
    if configuration.master_dtype != torch.float32:
        found.append(f"Shards are in float32, not in {_name(configuration.master_dtype)}.")
    if configuration.compiled:
        found.append("The trainer does not use torch.compile.")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
