"""Casts of the inputs and outputs of units, and copies of inputs to the device."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shardwise import _private
from shardwise._private import pytree

__all__ = ["cast_tensors", "move_tensors"]


def cast_tensors(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with all floating-point tensors in its containers cast to ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, values)


def move_tensors(values: Any, device: torch.device) -> Any:
    """Return ``values`` with all CPU tensors in its containers copied to ``device``.

    The host does not wait for copies from pinned memory. ``values`` itself if nothing is copied.
    """
    leaves = pytree.tree_leaves(values)
    if not any(isinstance(leaf, Tensor) and _is_on_cpu(leaf) for leaf in leaves):
        return values

    def move(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if not (isinstance(data, Tensor) and _is_on_cpu(data)):
            return leaf
        # Of what torch.vmap passes, it cannot be asked.
        is_pinned = not _private.is_transformed_by_functorch() and data.is_pinned()
        return leaf.to(device, non_blocking=is_pinned)

    # A PackedSequence keeps its sizes on the CPU.
    return pytree.tree_map(move, values, is_leaf=lambda node: isinstance(node, PackedSequence))


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
