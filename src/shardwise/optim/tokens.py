"""Gradients of the mean loss over all tokens of a step, on all ranks and micro-batches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import PlanError
from shardwise.features.agreement import Action
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.joined_ranks import JoinedRanks
from shardwise.optim.leaves import check_leaves, leaf_mean
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import mean_over_replicas, runtime_of_root
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
    """Accumulate the gradients of the mean loss over all tokens of a step, on all ranks::

        loss = sw.backward(
            model,
            micro_batches,                                            # those of this rank
            lambda b: cross_entropy(model(b.x), b.y, reduction="sum", ignore_index=-100),
            lambda b: (b.y != -100).sum(),
        )

    Every token has the same weight, regardless of its rank, its micro-batch and, with `elastic`,
    its replica. A rank may have no tokens. All tokens are counted before the first forward, so
    gradients need no correction afterwards.

    Args:
        model: the root of a sharded model. All ranks must call this, with the same number of
            micro-batches; inside `sw.join`, with one or more.
        micro_batches: this rank's micro-batches of one step; those of `sw.leaves` if the model is
            reproducible.
        loss_sum: runs the model on a micro-batch and returns the *sum* of its tokens' losses, a
            scalar.
        num_tokens: returns the number of tokens in a micro-batch that count.
        accumulate: ``"shards"`` reduces gradients after each micro-batch; ``"whole"`` reduces them
            once, and holds whole gradients until then. The sums are the same. With
            `optimizer_in_backward` and several micro-batches, pass ``"whole"``.
        scaler: scales the losses, for gradients in float16.

    Returns:
        The mean loss over all tokens of all ranks and replicas: a scalar, the same on every rank. 0
        if there are no tokens.

    Raises:
        PlanError: the model is not sharded, or an optimizer in backward would step after each
            micro-batch.
        ValueError: there is no micro-batch, or ``accumulate`` is not valid.
        PeerAborted: another rank raised, in the model or in one of the arguments.
    """
    if accumulate not in ("shards", "whole"):
        raise ValueError(f"accumulate={accumulate!r}: expected 'shards' or 'whole'")
    runtime = runtime_of_root(model)
    assert isinstance(model, FSDPModule)
    with runtime.scheduler.guarded():  # for errors of the arguments, which the units do not see
        batches = list(micro_batches)
        if not batches:
            raise ValueError(
                "no micro_batches: a rank without tokens must run one without tokens that count"
            )
        _check_number(runtime, len(batches), accumulate)
        weight = _weight(runtime, [num_tokens(batch) for batch in batches])
        losses = []
        # A reproducible model reduces gradients once in any case.
        is_whole = accumulate == "whole" and runtime.mesh.leaves is None
        try:
            for number, batch in enumerate(batches, start=1):
                if is_whole:
                    model.set_requires_gradient_sync(number == len(batches))
                loss = loss_sum(batch)
                loss = (loss * weight).to(loss.dtype)
                (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach().to(runtime.pools.device, torch.float64))
        finally:
            if is_whole:
                model.set_requires_gradient_sync(True)
        return _mean_loss(model, runtime, losses)


def _mean_loss(model: FSDPModule, runtime: Runtime, losses: list[Tensor]) -> Tensor:
    """The mean loss over all tokens, from the parts of this rank's micro-batches."""
    if runtime.mesh.leaves is not None:
        return leaf_mean(model, losses)
    total = torch.stack(losses).sum()
    joined = runtime.scheduler.call_observer
    if isinstance(joined, JoinedRanks):
        agreed = joined.announce(Action.SUM_LOSSES, amount=float(total))
        return torch.full_like(total, agreed.total / agreed.num_computing)
    if runtime.mesh.num_ranks > 1:
        total = across([total], runtime.mesh, runtime.mesh.world).mean()
    return mean_over_replicas(runtime, total)


def _check_number(runtime: Runtime, num_batches: int, accumulate: str) -> None:
    """Raise an error if a step cannot have ``num_batches`` micro-batches."""
    if runtime.mesh.leaves is not None:
        check_leaves(runtime.mesh, num_batches, "micro_batches")
    elif (
        num_batches > 1 and accumulate == "shards" and runtime.scheduler.sequencer.steps_in_backward
    ):
        raise PlanError(
            f"accumulate='shards': sw.optimizer_in_backward would step in each of {num_batches} "
            "micro-batches, with a part of the gradients; pass accumulate='whole'"
        )


def token_weight(model: nn.Module, num_tokens: int) -> float:
    """The factor of *sums* of losses that gives gradients of the mean over all tokens of a step.

    `backward` uses this weight; call this function in training loops that `backward` does not fit.

    Gradients are averaged over ranks. If losses are means, tokens of short batches (with much
    padding, for example) therefore weigh more than others. With sums and this weight, all tokens
    weigh the same, regardless of their rank, micro-batch and, with `elastic`, replica::

        weight = sw.token_weight(model, sum(int(mask.sum()) for mask in masks))
        for tokens, mask in zip(batches, masks):
            loss = (cross_entropy(model(tokens), ..., reduction="none") * mask).sum() * weight
            loss.backward()

    Args:
        model: the root of a sharded model. All ranks must call this once per step.
        num_tokens: the number of tokens in all micro-batches of this rank.

    Returns:
        The number of ranks (in a reproducible model, of micro-batches in a step) divided by the
        number of tokens on all ranks; 0 if there are no tokens.

    Raises:
        PlanError: the model is not sharded.
        ValueError: ``num_tokens`` is negative.
    """
    return float(_weight(runtime_of_root(model), [num_tokens]))


def _weight(runtime: Runtime, num_tokens: Sequence[int | Tensor]) -> Tensor:
    """`token_weight` as a tensor on the device, so that the host does not wait for it."""
    mesh, device = runtime.mesh, runtime.pools.device
    on_host = sum(count for count in num_tokens if not isinstance(count, Tensor))
    if on_host < 0:
        raise ValueError(f"num_tokens={on_host}: expected 0 or more")
    total = torch.full((), on_host, dtype=torch.int64, device=device)
    for count in num_tokens:
        if isinstance(count, Tensor):
            total = total + count.to(device, torch.int64, non_blocking=True).sum()
    num_computing = mesh.num_addends
    joined = runtime.scheduler.call_observer
    if isinstance(joined, JoinedRanks):
        agreed = joined.announce(Action.COUNT_TOKENS, amount=float(total))
        total, num_computing = torch.full_like(total, int(agreed.total)), agreed.num_computing
    elif mesh.num_ranks > 1:
        total = across([total], mesh, mesh.world).sum()
    total = mean_over_replicas(runtime, total.double())
    weight = num_computing / total
    return torch.where(total > 0, weight, torch.zeros_like(weight))
