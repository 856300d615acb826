"""Whole states to shards: each rank cuts its run out of the whole tensors that it has or gets."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.runtime.tensor import ShardedTensor
from shardwise.transport.process_group import broadcast_object, broadcast_tensors

__all__ = ["cut", "distribute", "group_of"]


def distribute(states: Any, like: Any, source: dist.ProcessGroup | None = None) -> Any:
    """``states`` with every whole tensor cut as its counterpart in ``like``.

    Args:
        states: nested dicts with whole tensors.
        like: dicts of the same structure with sharded tensors; a tensor instead of a dict is the
            counterpart of all tensors below it.
        source: the group whose first rank has ``states`` and sends them, one tensor at a time, so
            that the other ranks hold one whole tensor at a time. None if every rank has them.
    """
    outline = states if source is None else broadcast_object(_outline(states), source)
    return _cut_all(outline, states, like, source)


def cut(value: Any, parameter: Tensor) -> Any:
    """A copy of ``value`` as the state of ``parameter``: whole tensors and runs become shards.

    Raises:
        PlanError: its shape is neither that of the parameter nor that of this rank's run.
    """
    if not isinstance(value, Tensor):
        return value
    is_scalar = value.dim() == 0 and parameter.dim() > 0  # of the optimizer itself
    if isinstance(value, ShardedTensor) or not isinstance(parameter, ShardedTensor) or is_scalar:
        return value.detach().clone()
    run = parameter.sharding.run
    if value.shape == parameter.shape:
        value = value.reshape(-1)[run.start : run.stop]
    if value.shape != (len(run),):
        raise PlanError(
            f"{parameter.sharding.name}: expected a state of shape {tuple(parameter.shape)} or, on "
            f"this rank, ({len(run)},), got {tuple(value.shape)}"
        )
    return ShardedTensor(value.to(parameter.device, copy=True), parameter.sharding)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share ``model``; None for one rank or a model that is not sharded."""
    sharded = (p for p in model.parameters() if isinstance(p, ShardedTensor))
    first = next(sharded, None)
    return None if first is None else first.sharding.axis.group


def _outline(states: Any) -> Any:
    """``states`` with meta tensors; scalars stay as they are."""
    if isinstance(states, Mapping):
        return {key: _outline(value) for key, value in states.items()}
    return states.to("meta") if isinstance(states, Tensor) and states.dim() else states


def _cut_all(outline: Any, states: Any, like: Any, source: dist.ProcessGroup | None) -> Any:
    if isinstance(outline, Mapping):
        return {
            key: _cut_all(
                value,
                states.get(key) if isinstance(states, Mapping) else None,
                like.get(key) if isinstance(like, Mapping) else like,
                source,
            )
            for key, value in outline.items()
        }
    if not isinstance(outline, Tensor):
        return outline
    whole = outline
    if outline.is_meta:
        whole = torch.empty_like(outline, device=like.device if isinstance(like, Tensor) else "cpu")
        if isinstance(states, Tensor):
            whole.copy_(states)
        broadcast_tensors([whole], source)
    return cut(whole, like) if isinstance(like, Tensor) else whole
