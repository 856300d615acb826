"""Why a gradient may differ: how much of it comes from each part of the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["explain"]

_ROUNDING = 1e-6  # of float64 gradients, after a solve


def explain(found: Tensor, contributions: Sequence[Tensor]) -> str:
    """The likely cause of the error in ``found``; "" if none fits.

    Args:
        contributions: what each part of the batch adds to the expected gradient, their sum.
    """
    if not contributions or found.is_complex():
        return ""
    columns = torch.stack([one.detach().double().reshape(-1).cpu() for one in contributions], 1)
    target = found.detach().double().reshape(-1, 1).cpu()
    weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution
    scale = max(float(target.norm()), float(columns.norm()))
    if float((columns @ weights - target).norm()) > _ROUNDING * scale:
        return ""
    return _cause(weights.flatten().tolist())


def _cause(weights: list[float]) -> str:
    """What parts with these weights, instead of 1 each, say of the reduction."""
    number = len(weights)
    missing = [part for part, weight in enumerate(weights) if abs(weight) < _ROUNDING]
    if len(missing) == number:
        return "is zero"
    if missing:
        return (
            f"lacks part {missing[0]} of the batch: a dropped micro-batch, or a rank whose "
            "gradient was not reduced"
        )
    if max(weights) - min(weights) > _ROUNDING:
        shown = ", ".join(f"{weight / number:.3g}" for weight in weights)
        return (
            f"weighs the parts of the batch {shown}, expected {1 / number:.3g} each: a mean over "
            "ranks where one over rows or tokens is expected, or the reverse"
        )
    factor = sum(weights) / number
    cause = "a divisor or a loss scale"
    if abs(factor - number) < _ROUNDING:
        cause = f"a sum over the {number} data-parallel ranks where a mean is expected"
    elif abs(factor * number - 1) < _ROUNDING:
        cause = f"divided twice by the {number} data-parallel ranks"
    return f"is {factor:.4g} times what is expected: {cause}"
