"""`sw.verify` with optimizers of shardwise, and with a wire."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import shardwise as sw
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks


def _matrices(parameters: Iterator[nn.Parameter]) -> list[dict[str, Any]]:
    every = list(parameters)
    others = {"params": [p for p in every if p.ndim <= 1], "method": "adamw"}
    return [{"params": [p for p in every if p.ndim > 1]}, others]


def _batch(_step: int) -> Tensor:
    return torch.randn(12, WIDTH)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "muon": lambda parameters: sw.optim.Muon(_matrices(parameters)),
    "soap": lambda parameters: sw.optim.SOAP(_matrices(parameters), damping=1e-3),
    # In one process blocks do not begin anew with each row, so they have to divide it.
    "adam8bit": lambda parameters: sw.optim.Adam8bit(
        parameters, block=WIDTH, min_elements=WIDTH + 1
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_equals_one_process(name: str) -> None:
    found = sw.verify(
        lambda: Stack(depth=2),
        _batch,
        ["fsdp", "ddp"],
        units=Block,
        loss_fn=_loss,
        optimizer_fn=OPTIMIZERS[name],
        steps=3,
        granularity="row",
        quiet=True,
    )
    assert found.ok, found.explanation


@on_ranks(2)
def test_a_wire_differs_by_its_rounding_alone() -> None:
    found = sw.verify(
        lambda: Stack(depth=2),
        _batch,
        ["fsdp"],
        units=Block,
        loss_fn=_loss,
        optimizer_fn=lambda parameters: SGD(parameters, lr=0.1),
        tolerance=0.5,
        wire=sw.Wire("int8", "int8", block=64),
        quiet=True,
    )
    assert found.ok, found.explanation
    (one,) = found.comparisons
    assert one.gradient.error > 1e-6


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss
