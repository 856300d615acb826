"""Activations that are not kept: torch's own utilities, as the configuration names them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

__all__ = ["KINDS", "recomputed"]

_aten = torch.ops.aten

# What costs most to compute again for what it takes to keep.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
    }
)


def recomputed(block: nn.Module, kind: str) -> Callable[..., Any]:
    """``block``, of whose activations backward computes again what ``kind`` says.

    Args:
        block: a module.
        kind: "full" keeps its inputs alone, as does "reentrant", the older way; "selective" keeps
            the results of matrix products and attention besides.
    """
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    return partial(checkpoint, block, use_reentrant=kind == "reentrant")


KINDS = ("full", "reentrant", "selective")


def _policy(
    _context: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    is_kept = operator in _KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
