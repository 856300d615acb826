"""Casts of the inputs and outputs of units."""

from typing import Any

import torch
from torch import Tensor

from shardwise._private import pytree

__all__ = ["cast_tensors"]


def cast_tensors(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with all floating-point tensors in its containers cast to ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, values)
