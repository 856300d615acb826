"""A loss that is a mean over tokens, whichever rank and micro-batch they fall on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import FSDPModule, runtime_of_root
from shardwise.tensor.reductions import across

__all__ = ["backward", "token_weight"]

B = TypeVar("B")


def backward(
    model: nn.Module,
    micro_batches: Iterable[B],
    loss_sum: Callable[[B], Tensor],
    num_tokens: Callable[[B], int | Tensor],
    *,
    accumulate: Literal["shards", "whole"] = "shards",
    scaler: GradScaler | None = None,
) -> Tensor:
    """Add up the gradients of the mean loss over all tokens of a step, on all ranks::

        loss = sw.backward(
            model,
            micro_batches,                                            # of this rank
            lambda b: cross_entropy(model(b.x), b.y, reduction="sum", ignore_index=-100),
            lambda b: (b.y != -100).sum(),
        )

    Every token has the same weight, however tokens fall on ranks and micro-batches; a rank may
    have none.
    All are counted before the first forward, so gradients need no correction afterwards.

    Args:
        model: the root, sharded. All ranks have to call this, with as many micro-batches.
        micro_batches: of this rank, for one step.
        loss_sum: runs the model on one and returns the *sum* of its tokens' losses, a scalar.
        num_tokens: how many tokens of one count.
        accumulate: ``"shards"`` reduces after each micro-batch; ``"whole"`` once, and holds whole
            gradients until then. The sums are the same.
        scaler: of the losses, where gradients are in float16.

    Returns:
        The mean loss over all tokens of all ranks: a scalar, the same on every rank; 0 without any.

    Raises:
        PlanError: the model is not sharded.
        ValueError: there is no micro-batch, or ``accumulate`` is another word.
    """
    if accumulate not in ("shards", "whole"):
        raise ValueError(f"accumulate={accumulate!r}: expected 'shards' or 'whole'")
    batches = list(micro_batches)
    if not batches:
        raise ValueError("no micro_batches: a rank without tokens runs one in which none counts")
    assert isinstance(model, FSDPModule)
    runtime = runtime_of_root(model)
    weight = _weight(runtime, [num_tokens(batch) for batch in batches])
    total = torch.zeros((), dtype=torch.float64, device=runtime.pools.device)
    try:
        for number, batch in enumerate(batches, start=1):
            if accumulate == "whole":
                model.set_requires_gradient_sync(number == len(batches))
            loss = loss_sum(batch)
            loss = (loss * weight).to(loss.dtype)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    finally:
        if accumulate == "whole":
            model.set_requires_gradient_sync(True)
    return (
        across([total], runtime.mesh, runtime.mesh.world).mean()
        if runtime.mesh.num_ranks > 1
        else total
    )


def token_weight(model: nn.Module, num_tokens: int) -> float:
    """What to multiply *sums* of losses by, for gradients of the mean over all tokens of a step.

    `backward` does that, and all around it; this is for loops of another shape.

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
    return float(_weight(runtime_of_root(model), [num_tokens]))


def _weight(runtime: Runtime, num_tokens: Sequence[int | Tensor]) -> Tensor:
    """`token_weight`, on the device: the host does not wait for it."""
    mesh, device = runtime.mesh, runtime.pools.device
    on_host = sum(count for count in num_tokens if not isinstance(count, Tensor))
    if on_host < 0:
        raise ValueError(f"num_tokens={on_host}: expected 0 or more")
    total = torch.full((), on_host, dtype=torch.int64, device=device)
    for count in num_tokens:
        if isinstance(count, Tensor):
            total = total + count.to(device, torch.int64, non_blocking=True).sum()
    if mesh.num_ranks > 1:
        total = across([total], mesh, mesh.world).sum()
    weight = mesh.num_ranks / total.double()
    return torch.where(total > 0, weight, torch.zeros_like(weight))
