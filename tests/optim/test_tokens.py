"""Every token has the same weight, regardless of its rank and micro-batch."""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.modules import raise_together
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_models,
    rank,
    sharded_pair,
    step_all,
    world_size,
)

ROWS = 12


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.thorough), "fsdp"])
def test_gradients_do_not_depend_on_where_tokens_are(strategy: str) -> None:
    reference, model = sharded_pair("stack", strategy=strategy)
    for step in range(3):
        rows = torch.randn(ROWS, WIDTH).double()
        mask = (torch.rand(ROWS) < 0.5).double()
        mask[0] = 1.0
        (_losses(reference, rows, mask) / mask.sum()).backward()  # type: ignore[no-untyped-call]
        # Shares of different lengths, in micro-batches of different sizes.
        bounds = [0, *(ROWS * (n * n) // world_size() ** 2 for n in range(1, world_size() + 1))]
        own = slice(bounds[rank()], bounds[rank() + 1])
        weight = sw.token_weight(model, int(mask[own].sum()))
        parts = [slice(None, step), slice(step, None)]  # the first may be empty
        for part in parts:
            loss = _losses(model, rows[own][part], mask[own][part]) * weight
            loss.backward()  # type: ignore[no-untyped-call]
        assert_equal_models(model, reference, step)
        for one in (model, reference):
            one.zero_grad()


@on_ranks(3, thorough=(1, 2, 4))
def test_backward_computes_gradients_of_the_mean_over_all_tokens() -> None:
    """On any number of ranks and micro-batches, some of them without tokens."""
    reference, model = sharded_pair("stack")
    modes: tuple[Literal["shards", "whole"], ...] = ("shards", "whole")
    for num_parts, accumulate, masked in itertools.product(
        (1, 2, 4), modes, ("half", "last rank", "all")
    ):
        rows, mask = torch.randn(ROWS, WIDTH).double(), (torch.rand(ROWS) < 0.5).double()
        mask[0] = 1.0
        by_rank = _cut(rows, mask, world_size())
        if masked == "all" or (masked == "last rank" and world_size() > 1):
            for _, own in by_rank if masked == "all" else by_rank[-1:]:
                own.zero_()
        expected = _losses(reference, rows, mask) / mask.sum().clamp(min=1)
        expected.backward()  # type: ignore[no-untyped-call]
        loss = sw.backward(
            model,
            _cut(*by_rank[rank()], num_parts),
            lambda part: _losses(model, *part),
            lambda part: part[1].sum(),
            accumulate=accumulate,
        )
        what = f"{num_parts} micro-batches, {accumulate}, {masked}"
        assert_close(loss, expected.detach(), what)
        assert_equal_models(model, reference, 0)
        for one in (model, reference):
            one.zero_grad()


@on_ranks(2)
def test_an_optimizer_in_backward_steps_once() -> None:
    reference, model = sharded_pair("stack")
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    sw.optimizer_in_backward(model, optimizers[1])
    rows, mask = torch.randn(ROWS, WIDTH).double(), torch.ones(ROWS).double()
    parts = _cut(*_cut(rows, mask, world_size())[rank()], 2)

    def run(**options: Any) -> None:
        sw.backward(
            model, parts, lambda part: _losses(model, *part), lambda part: len(part[1]), **options
        )

    with pytest.raises(sw.PlanError, match=r"accumulate='shards'.*each of 2 .*accumulate='whole'"):
        run()
    run(accumulate="whole")
    (_losses(reference, rows, mask) / ROWS).backward()  # type: ignore[no-untyped-call]
    step_all(optimizers)
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_backward_with_a_scaler_and_after_an_exception() -> None:
    model = sw.fully_shard(build("stack"), units=Block)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parts = _cut(torch.randn(ROWS, WIDTH).double(), torch.ones(ROWS).double(), 2)

    def run(**options: Any) -> list[Tensor]:
        model.zero_grad()
        sw.backward(
            model, parts, lambda part: _losses(model, *part), lambda part: len(part[1]), **options
        )
        return [
            p.grad.to_local().clone()
            for p in model.parameters()
            if isinstance(p.grad, sw.ShardedTensor)
        ]

    plain, scaled = run(), run(scaler=scaler)
    assert plain
    assert all(torch.equal(4 * p, q) for p, q in zip(plain, scaled, strict=True))

    def fail(_part: Part) -> Tensor:
        raise_together(KeyError(), dist.group.WORLD)

    with pytest.raises(KeyError):
        sw.backward(model, parts, fail, lambda part: len(part[1]), accumulate="whole")
    model.zero_grad()
    _losses(model, *parts[1]).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters()), "the next backward reduces"


@on_ranks(2)
def test_a_step_without_tokens_has_weight_zero() -> None:
    model = sw.fully_shard(build("stack"), units=Block)
    assert sw.token_weight(model, 0) == 0.0
    assert sw.token_weight(model, 3) == 2 / 6


def test_mistakes() -> None:
    with pytest.raises(sw.PlanError, match="is not sharded"):
        sw.token_weight(nn.Linear(2, 2), 4)
    model = sw.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="num_tokens=-1: expected 0 or more"):
        sw.token_weight(model, -1)
    with pytest.raises(ValueError, match="no micro_batches"):
        sw.backward(model, [], torch.sum, len)
    with pytest.raises(ValueError, match="accumulate='all': expected 'shards' or 'whole'"):
        sw.backward(model, [], torch.sum, len, accumulate="all")  # type: ignore[arg-type]


def _losses(model: nn.Module, rows: Tensor, mask: Tensor) -> Tensor:
    total: Tensor = (model(rows).square().mean(1) * mask).sum()
    return total


Part = tuple[Tensor, Tensor]


def _cut(rows: Tensor, mask: Tensor, num_parts: int) -> list[Part]:
    """Parts of different lengths, some of them empty."""
    bounds = [round(len(rows) * (n / num_parts) ** 2) for n in range(num_parts + 1)]
    cuts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    return [(rows[cut], mask[cut]) for cut in cuts]


@on_ranks(2)
@pytest.mark.parametrize("place", ["micro_batches", "num_tokens", "loss_sum", "after forward"])
def test_an_error_of_one_rank_is_raised_by_all(place: str) -> None:
    reference, model = sharded_pair("stack")
    rows, mask = torch.randn(ROWS, WIDTH).double(), torch.ones(ROWS).double()
    own = _cut(rows, mask, world_size())[rank()]

    def step(failing: str) -> None:
        def at(where: str) -> None:
            if where == failing:
                raise ArithmeticError(where)

        def micro_batches() -> Iterator[slice]:
            yield slice(None, 2)
            at("micro_batches")
            yield slice(2, None)

        def num_tokens(part: slice) -> Tensor:
            at("num_tokens")
            return own[1][part].sum()

        def loss_sum(part: slice) -> Tensor:
            at("loss_sum")
            loss = _losses(model, own[0][part], own[1][part])
            at("after forward")
            return loss

        sw.backward(model, micro_batches(), loss_sum, num_tokens)

    with pytest.raises(sw.PeerAborted if rank() else ArithmeticError, match=place):
        step("" if rank() else place)
    model.zero_grad()
    step("")
    (_losses(reference, rows, mask) / ROWS).backward()  # type: ignore[no-untyped-call]
    assert_equal_models(model, reference, 0)
