"""`sw.verify` with shardwise's optimizers, with a wire, and with replicas."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.verification.optimizers import optimizer_fn
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks


def _batch(_step: int) -> Tensor:
    return torch.randn(12, WIDTH)


@on_ranks(2)
def test_soap_equals_one_process() -> None:
    """`tests/cli/test_verify.py` verifies the others by the command."""
    options: dict[str, Any] = {"units": Block, "loss_fn": _loss, "quiet": True}
    found = sw.verify(
        lambda: Stack(depth=2),
        _batch,
        ["fsdp", "ddp"],
        optimizer_fn=optimizer_fn("soap"),
        steps=3,
        granularity="row",
        **options,
    )
    assert found.ok, found.explanation


@on_ranks(2)
@pytest.mark.parametrize("reduce", ["int8", "int4"])
def test_a_sum_in_the_place_of_a_mean_is_found_with_a_wire(reduce: str) -> None:
    (one,) = _verify_wire(reduce).comparisons
    assert one.ok, one.differences
    assert one.gradient.error > 1e-6

    def finish(self: Any) -> None:
        self._reduction.out.copy_(self._value)

    with mock.patch("shardwise.comm.quantized._Sum._finish", finish):
        (one,) = _verify_wire(reduce).comparisons
    assert any("the gradient of" in difference for difference in one.differences)


def _verify_wire(reduce: str) -> sw.Verification:
    return sw.verify(
        lambda: Stack(depth=2),
        _batch,
        ["fsdp"],
        units=Block,
        loss_fn=_loss,
        optimizer_fn=optimizer_fn("sgd"),
        tolerance=0.5,
        wire=sw.Wire("int8", reduce, block=8),
        quiet=True,
    )


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
    assert one.num_steps == 3  # the first fragment is sent after step 2 and applied after step 3
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
