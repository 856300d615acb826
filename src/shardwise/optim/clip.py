"""Clipping by the global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their norm, over all ranks, is at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, which gives the same numbers on a sharded model; every
    rank has to call it. The norms of all gradients take one exchange.

    Returns:
        The norm before clipping: a scalar, the same on every rank.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, foreach=True)
