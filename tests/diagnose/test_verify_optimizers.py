"""`sw.verify` with optimizers of shardwise, with a wire, and of replicas."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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


REPLICAS: dict[str, Any] = {"units": Block, "loss_fn": _loss, "quiet": True}
STREAMED = sw.Outer(every=4, fragments=2, delay=1, mixing=0.25, dtype="float64")


@on_ranks(2, 4)
def test_replicas_equal_replicas_in_one_process() -> None:
    found = sw.verify(
        lambda: Stack(depth=2), _batch, ["fsdp", "ddp"], outer=STREAMED, steps=7, **REPLICAS
    )
    assert found.ok, found.explanation
    assert [one.num_steps for one in found.comparisons] == [7, 7]


@on_ranks(2)
def test_replicas_that_never_synchronize_differ() -> None:
    with mock.patch.object(sw.OuterOptimizer, "_synchronize"):  # undone in this rank
        found = sw.verify(
            lambda: Stack(depth=2), _batch, "fsdp", outer=STREAMED, steps=7, **REPLICAS
        )
    (one,) = found.comparisons
    assert one.num_steps == 3  # the first fragment is sent after step 2, and applied after step 3
    assert one.parameter.error > 1e-3
    assert one.gradient.error < 1e-10


@on_ranks(2)
def test_what_cannot_be_verified_of_replicas_is_refused() -> None:
    verify = partial(sw.verify, lambda: Stack(depth=2), _batch, **REPLICAS)
    with pytest.raises(sw.PlanError, match=r"steps=4: .* pass steps=5 or more"):
        verify(outer=STREAMED, steps=4)
    with pytest.raises(sw.PlanError, match="rounded when they are sent; pass Outer"):
        verify(outer=sw.Outer(every=1), steps=4)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(sw.PlanError, match="expected two named dims"):
        verify(outer=STREAMED, steps=5, mesh=mesh)
    with pytest.raises(sw.PlanError, match="omit it to verify another one"):
        verify(outer=STREAMED, steps=5, engine=lambda model, *_: model)
