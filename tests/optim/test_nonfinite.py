"""A gradient that is not finite is named on every rank, with its unit."""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import options_of


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [options_of("fsdp"), options_of("ddp"), {"granularity": "dim"}], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_gradient_in_backward_is_named(options: dict[str, Any], value: float) -> None:
    """Only one rank's loss is affected, from the second block on."""
    model = sw.fully_shard(Stack().double(), units={Block}, **options)
    _backward(model, value if dist.get_rank() == 1 else 1.0)
    assert not sw.clip_grad_norm_(model.parameters(), 1.0).isfinite()  # leaves them unchanged
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(sw.StepError) as caught:
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    text = str(caught.value)
    kind = "NaN" if math.isnan(value) else "Inf"
    assert "10 of 16 gradients are not finite" in text
    assert re.search(rf"layers\.1\.down\.bias of unit layers\.1 \(\d+ {kind} in 6 elements\)", text)
    assert text.index("layers.1.down.bias") < text.index("layers.1.up.bias")
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_loss_that_is_not_finite_and_a_norm_that_overflows_have_different_errors() -> None:
    model = sw.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    (model(torch.ones(2, WIDTH)).sum() * math.nan).backward()
    with pytest.raises(sw.StepError, match="loss or an activation"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    with pytest.raises(sw.StepError, match="every gradient is finite"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_parameters_that_are_not_sharded_are_named_by_position() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.full((1, 2), math.nan)).sum().backward()
    with pytest.raises(sw.StepError, match=r"parameter 0 \(4 NaN in 4 elements\)"):
        sw.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)


def _backward(model: nn.Module, factor: float) -> None:
    def scale_gradient(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    model.get_submodule("layers.1").register_forward_hook(scale_gradient)
    model(torch.ones(2, WIDTH).double()).square().mean().backward()
