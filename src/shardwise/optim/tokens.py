"""A loss that is a mean over tokens, whichever rank and micro-batch they fall on."""

import torch
from torch import nn

from shardwise.runtime.engine import runtime_of_root
from shardwise.runtime.guard import Scope
from shardwise.runtime.reductions import across

__all__ = ["token_weight"]


def token_weight(model: nn.Module, num_tokens: int) -> float:
    """What to multiply *sums* of losses by, for gradients of the mean over all tokens of a step.

    Gradients are averaged over ranks, so means of unequal numbers of tokens, padded sequences say,
    would count the tokens of short batches for more. With sums and this weight they count alike,
    however they fall on ranks and micro-batches::

        weight = sw.token_weight(model, sum(int(mask.sum()) for mask in masks))
        for tokens, mask in zip(batches, masks):
            loss = (cross_entropy(model(tokens), ..., reduction="none") * mask).sum() * weight
            loss.backward()

    Args:
        model: the root, sharded. All ranks have to call this, once a step.
        num_tokens: of this rank, in all its micro-batches of the step.

    Returns:
        Ranks divided by the tokens of all of them; 0 if there are none.

    Raises:
        PlanError: the model is not sharded.
        ValueError: ``num_tokens`` is negative.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens}: expected 0 or more")
    runtime = runtime_of_root(model)
    axis = runtime.axis
    own = torch.tensor(num_tokens, dtype=torch.int64, device=runtime.pool.device)
    total = num_tokens if axis.num_ranks == 1 else int(across([own], axis, Scope.ALL).sum())
    return axis.num_ranks / total if total else 0.0
