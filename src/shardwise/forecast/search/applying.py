"""Trains a module under a configuration: what the code of `call_of` does."""

from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.api import fully_shard
from shardwise.errors import PlanError
from shardwise.features.activation_offload import offload_activations
from shardwise.forecast.configuration import MODEL_AXES, Configuration
from shardwise.forecast.planned import sharding_of
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.plan.policies import choose_units

__all__ = ["apply_to"]


def apply_to(model: nn.Module, configuration: Configuration) -> nn.Module:
    """Checkpoint, compile and shard ``model``, and offload its activations; return it.

    Raises:
        PlanError: the configuration is for another number of ranks, or for model parallelism, which
            needs a mesh.
    """
    axes = [name for name in MODEL_AXES if getattr(configuration, name) > 1]
    if axes:
        raise PlanError(
            f"{axes[0]}={getattr(configuration, axes[0])}: model parallelism needs a mesh and a "
            "model that is divided; the code of the plan has its call of fully_shard"
        )
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks != configuration.world_size:
        raise PlanError(
            f"the configuration is for {configuration.world_size} ranks, but there are {num_ranks}"
        )
    if configuration.outer is not None:
        raise PlanError(
            "outer=: apply() shards the model of one replica; the code of the plan has the "
            "call of sw.outer_optimizer"
        )
    if configuration.float8 != "none":
        raise PlanError(
            f"float8={configuration.float8!r}: convert the linear layers with torchao first, and "
            "call fully_shard as in the code of the plan"
        )
    if configuration.adapters is not None and all(p.requires_grad for p in model.parameters()):
        raise PlanError(
            "adapters: the model has no frozen weights; pass a model with adapters, as from "
            "peft.get_peft_model"
        )
    if configuration.checkpointing != "none":
        checkpoint_blocks(model, configuration.checkpointing)
    if configuration.compiled:
        for name in choose_units(model, "auto")[1:]:
            model.get_submodule(name).compile()
    fully_shard(model, **sharding_of(configuration))
    if configuration.activation_offload:
        _offload_in_forward(model)
    return model


def _offload_in_forward(model: nn.Module) -> None:
    """Offload the tensors that autograd saves in each forward of ``model`` to the host."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(offload_activations(model))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
