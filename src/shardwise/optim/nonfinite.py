"""Names the gradients that are NaN or infinite, for the error of a step with such a norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.tensor.reductions import across
from shardwise.tensor.sharding import local_of, mesh_of, sharding_of

__all__ = ["describe_nonfinite"]

_MAX_NAMED = 4


@torch.no_grad()
def describe_nonfinite(parameters: Sequence[Tensor]) -> str:
    """Name the gradients that are not finite on any rank, in the order of backward.

    Every rank must call this. ``parameters`` are in the order of ``model.parameters()``. Backward
    reaches the last one first, and carries its NaN and Inf on to those before it.
    """
    counts = _count_nonfinite(parameters)  # [parameters, NaN and Inf]
    found = [index for index, count in enumerate(counts) if any(count)]
    if not found:
        return (
            "every gradient is finite, but their norm overflows; lower the loss scale or the "
            "learning rate"
        )
    num_gradients = sum(parameter.grad is not None for parameter in parameters)
    first, *others = (_named(parameters, index, counts[index]) for index in reversed(found))
    text = (
        f"{len(found)} of {num_gradients} gradients are not finite. The first in backward: {first}"
    )
    if others:
        text += f"; then {', '.join(others[:_MAX_NAMED])}"
    if len(others) > _MAX_NAMED:
        text += f" and {len(others) - _MAX_NAMED} more"
    if parameters[found[-1]] is parameters[-1]:
        text += (
            ". It is the last parameter, so the loss or an activation was not finite before "
            "backward began"
        )
    return f"{text}. torch.autograd.set_detect_anomaly(True) names the operation"


def _count_nonfinite(parameters: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of NaN and Inf in each gradient over all ranks; replicas count once."""
    own = [_counts(parameter.grad) for parameter in parameters]
    mesh = mesh_of(parameters)
    if mesh is None or mesh.num_ranks == 1:
        return own
    counts = torch.tensor(own, dtype=torch.int64, device="cpu")
    by_rank = across(counts.view(-1).to(parameters[0].device).unbind(), mesh)
    total: list[list[int]] = by_rank.sum(0).view(-1, 2).tolist()
    return total


def _counts(gradient: Tensor | None) -> list[int]:
    if gradient is None:
        return [0, 0]
    local = local_of(gradient)
    num_nan = int(local.isnan().sum())
    return [num_nan, int((~local.isfinite()).sum()) - num_nan]


def _named(parameters: Sequence[Tensor], index: int, count: Sequence[int]) -> str:
    sharding = sharding_of(parameters[index])
    name = f"parameter {index}" if sharding is None else f"{sharding.name} of unit {sharding.unit}"
    kinds = [
        f"{number} {kind}" for number, kind in zip(count, ("NaN", "Inf"), strict=True) if number
    ]
    return f"{name} ({', '.join(kinds)} in {parameters[index].numel()} elements)"
