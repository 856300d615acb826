"""Clipping by the global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.errors import StepError
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their norm, over all ranks, is at most ``max_norm``.

    Every rank has to call it. `torch.nn.utils.clip_grad_norm_` gives the same numbers on a sharded
    model, but on a CPU takes a collective for each gradient unless ``foreach=True`` is passed.

    Returns:
        The norm before clipping: a scalar, the same on every rank.

    Raises:
        StepError: `sw.optimizer_in_backward` has used and dropped the gradients.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in parameters:
        if isinstance(parameter, ShardedTensor) and parameter.steps_in_backward:
            raise StepError(
                f"{parameter.sharding.name}: clipping by the global norm needs all gradients at "
                "once, and sw.optimizer_in_backward has used each and dropped it; clip single "
                "gradients in register_post_accumulate_grad_hook, or call remove() of its handle"
            )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, foreach=True)
