"""Gradients of the mean loss over all tokens of a step, on all ranks and micro-batches."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardwise.comm.device import random_states, seed_generators, set_random_states
from shardwise.errors import PlanError
from shardwise.features.agreement import Action
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.joined_ranks import JoinedRanks
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import mean_over_replicas, runtime_of_root
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import across, sum_over_leaves

__all__ = ["backward", "leaf_mean", "leaf_rng", "leaves", "token_weight"]

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
            once, and holds whole gradients until then. The sums are the same.
        scaler: scales the losses, for gradients in float16.

    Returns:
        The mean loss over all tokens of all ranks and replicas: a scalar, the same on every rank. 0
        if there are no tokens.

    Raises:
        PlanError: the model is not sharded.
        ValueError: there is no micro-batch, or ``accumulate`` is not valid.
    """
    if accumulate not in ("shards", "whole"):
        raise ValueError(f"accumulate={accumulate!r}: expected 'shards' or 'whole'")
    batches = list(micro_batches)
    if not batches:
        raise ValueError(
            "no micro_batches: a rank without tokens must run one without tokens that count"
        )
    assert isinstance(model, FSDPModule)
    runtime = runtime_of_root(model)
    is_reproducible = runtime.mesh.leaves is not None  # then the engine reduces gradients once
    if is_reproducible:
        check_leaves(runtime.mesh, len(batches), "micro_batches")
    weight = _weight(runtime, [num_tokens(batch) for batch in batches])
    losses = []
    try:
        for number, batch in enumerate(batches, start=1):
            if accumulate == "whole" and not is_reproducible:
                model.set_requires_gradient_sync(number == len(batches))
            loss = loss_sum(batch)
            loss = (loss * weight).to(loss.dtype)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().to(runtime.pools.device, torch.float64))
    finally:
        if accumulate == "whole" and not is_reproducible:
            model.set_requires_gradient_sync(True)
    if is_reproducible:
        return leaf_mean(model, losses)
    total = torch.stack(losses).sum()
    joined = runtime.scheduler.call_observer
    if isinstance(joined, JoinedRanks):
        agreed = joined.announce(Action.SUM_LOSSES, amount=float(total))
        return torch.full_like(total, agreed.total / agreed.num_computing)
    if runtime.mesh.num_ranks > 1:
        total = across([total], runtime.mesh, runtime.mesh.world).mean()
    return mean_over_replicas(runtime, total)


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


def leaves(model: nn.Module) -> range:
    """The micro-batches of each step that this rank runs, in order.

    They are numbered over all ranks, from 0 to ``reproducible - 1``. Choose the data and the random
    numbers of a micro-batch by its number and not by the rank::

        model = sw.fully_shard(model, units=Block, reproducible=8)
        for step in range(steps):
            losses = []
            for leaf in sw.leaves(model):
                with sw.leaf_rng(seed, step, leaf):
                    loss = model(batch_of(step, leaf)).mean()
                loss.backward()                        # of a mean, not divided by 8
                losses.append(loss.detach())
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(sw.leaf_mean(model, losses))

    Raises:
        PlanError: the model is not reproducible.
    """
    mesh = runtime_of_root(model).mesh
    if mesh.leaves is None:
        raise PlanError("sw.leaves: the model has none; pass reproducible=... to fully_shard")
    return mesh.own_leaves


def leaf_mean(model: nn.Module, values: Sequence[Tensor]) -> Tensor:
    """The mean of a scalar over all micro-batches of a step, with the same bits on any ranks.

    Args:
        model: a reproducible model. All ranks must call this.
        values: this rank's scalars, of one dtype, one for each of `sw.leaves`. They are summed in
            float64.

    Raises:
        PlanError: the model is not reproducible.
        ValueError: the number of values is not that of this rank's micro-batches, or they are no
            scalars.
    """
    leaves(model)
    runtime = runtime_of_root(model)
    mesh, device = runtime.mesh, runtime.pools.device
    check_leaves(mesh, len(values), "values")
    if any(value.numel() != 1 for value in values):
        raise ValueError(f"expected scalars, got shapes {[tuple(value.shape) for value in values]}")
    exact = [value.detach().to(device, torch.float64).reshape(1) for value in values]
    return (sum_over_leaves(exact, mesh)[0] / mesh.num_addends).to(values[0].dtype)


def check_leaves(mesh: DataParallelMesh, number: int, what: str) -> None:
    """Raise a ValueError if ``number`` is not the number of this rank's micro-batches."""
    expected = len(mesh.own_leaves)
    if number != expected:
        raise ValueError(
            f"{number} {what}: expected {expected}, one for each micro-batch that this rank of "
            f"{mesh.num_ranks} runs of the {mesh.leaves} in a step (sw.leaves)"
        )


@contextlib.contextmanager
def leaf_rng(seed: int, step: int, leaf: int) -> Iterator[None]:
    """Seed torch's default generators with (``seed``, ``step``, ``leaf``) in the block.

    Dropout in the forward of a micro-batch then draws the same numbers on any rank. Activation
    checkpointing draws them again in backward, inside the block or after it, because torch restores
    the state of the generators when it recomputes a forward. At the end of the block the generators
    return to their states before it. They are those of the CPU and of the current accelerator,
    which is that of the model unless it was changed after `fully_shard`.

    There is nothing to save but ``seed`` and ``step``, as in ``sw.save(path, model=model,
    optimizer=optimizer, step=step)``.

    Args:
        seed: of the run.
        step: number of the optimizer step.
        leaf: number of the micro-batch, from `sw.leaves`.
    """
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    states = random_states(device)
    digest = hashlib.blake2b(f"{seed} {step} {leaf}".encode(), digest_size=8).digest()
    seed_generators(device, int.from_bytes(digest) >> 1)
    try:
        yield
    finally:
        set_random_states(device, states)
