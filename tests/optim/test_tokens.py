"""Every token counts alike, however tokens fall on ranks and micro-batches."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Block, build
from tests.ranks import run_on
from tests.runtime.one_process import assert_close, rank, world_size

ROWS = 12


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_do_not_depend_on_where_tokens_fall(ranks: int, strategy: str) -> None:
    run_on(ranks, _train, strategy)


def test_a_step_without_tokens_weighs_nothing() -> None:
    run_on(2, _no_tokens)


def test_mistakes() -> None:
    with pytest.raises(sw.PlanError, match="is not sharded"):
        sw.token_weight(nn.Linear(2, 2), 4)
    model = sw.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="num_tokens=-1: expected 0 or more"):
        sw.token_weight(model, -1)


def _losses(model: nn.Module, rows: Tensor, mask: Tensor) -> Tensor:
    total: Tensor = (model(rows).square().mean(1) * mask).sum()
    return total


def _train(strategy: str) -> None:
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=Block, strategy=strategy)
    for step in range(3):
        rows = torch.randn(ROWS, WIDTH).double()
        mask = (torch.rand(ROWS) < 0.5).double()
        mask[0] = 1.0
        (_losses(reference, rows, mask) / mask.sum()).backward()  # type: ignore[no-untyped-call]
        # Shares of unlike lengths, cut into unlike micro-batches.
        bounds = [0, *(ROWS * (n * n) // world_size() ** 2 for n in range(1, world_size() + 1))]
        own = slice(bounds[rank()], bounds[rank() + 1])
        weight = sw.token_weight(model, int(mask[own].sum()))
        parts = [slice(None, step), slice(step, None)]  # the first may be empty
        for part in parts:
            loss = _losses(model, rows[own][part], mask[own][part]) * weight
            loss.backward()  # type: ignore[no-untyped-call]
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name)
            p.grad, q.grad = None, None


def _no_tokens() -> None:
    model = sw.fully_shard(build("stack"), units=Block)
    assert sw.token_weight(model, 0) == 0.0
    assert sw.token_weight(model, 3) == 2 / 6
