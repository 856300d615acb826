"""Weight gradients in their slot: used where they can be, right where they cannot."""

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.in_slot import SlotLinear
from tests.ranks import run_on
from tests.runtime.one_process import rank

WIDTH = 256  # a weight is large enough for a slot


class Block(nn.Sequential):
    """A unit that uses its layer as ``way`` says."""

    way = "once"

    def forward(self, x: Tensor) -> Tensor:
        layer = self[0]
        assert isinstance(layer, nn.Linear)
        y: Tensor = layer(x)
        match self.way:
            case "twice":
                y = layer(y.tanh())
            case "beside":
                y = y + functional.linear(x, layer.weight)
            case "penalty":
                y = y + layer.weight.square().mean()
            case "hook" if layer.weight.requires_grad and torch.is_grad_enabled():
                layer.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
            case "grad":
                with torch.enable_grad():
                    z = layer(x.detach()).sum()
                    (own,) = torch.autograd.grad(z, layer.weight)
                y = y + (own - x.detach().sum(0)).mean()  # nothing, if it is right
        return y


def _build(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Linear(WIDTH, WIDTH)), Block(nn.Linear(WIDTH, WIDTH))).double()
    for block in model:
        assert isinstance(block, Block)
        block.way = way
    return model


def _gradients(model: nn.Module, ranks: int, turns: int) -> None:
    for turn in range(turns):
        torch.manual_seed(turn)
        batch = torch.randn(ranks, 3, WIDTH, dtype=torch.float64)
        own = batch[rank()] if isinstance(model, sw.FSDPModule) else batch.flatten(0, 1)
        model(own).square().mean().backward()


def _train(way: str, strategy: str) -> tuple[int, float]:
    """Slots that were claimed, and the largest error."""
    whole, model = _build(way), _build(way)
    sw.fully_shard(model, units=Block, strategy=strategy)
    claims: list[bool] = []
    claim = Gradients.claim

    def count(gradients: Gradients, position: int) -> Any:
        slot = claim(gradients, position)
        claims.append(slot is not None)
        return slot

    with mock.patch.object(Gradients, "claim", count):
        _gradients(model, 2, 2)
    _gradients(whole, 2, 2)
    error = 0.0
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, sw.ShardedTensor)
        assert other.grad is not None
        apart = (one.grad.full_tensor() - other.grad).abs().max() / other.grad.abs().max()
        error = max(error, float(apart))
    return sum(claims), error


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("way", ["once", "twice", "beside", "penalty", "hook", "grad"])
def test_gradients_are_those_of_one_process(way: str, strategy: str) -> None:
    for num_claims, error in run_on(2, _train, way, strategy):
        assert error < 1e-10
        assert num_claims == (0 if way == "hook" else 4), "two layers, two backwards"


class Registered(nn.Linear):
    """Has a word in what derives from it."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls.__name__)


class Plain(nn.Linear):
    """Adds nothing."""


def _classes() -> tuple[str, str, bool, list[str]]:
    model = nn.Sequential(Plain(WIDTH, WIDTH), Registered(WIDTH, WIDTH))
    model = sw.fully_shard(model)
    plain, registered = model
    loss = model(torch.randn(3, WIDTH)).sum()
    loss.backward()
    return (
        type(plain).__qualname__,
        type(registered).__qualname__,
        isinstance(plain, Plain) and isinstance(plain, SlotLinear),
        Registered.known,
    )


def test_subclasses_without_a_forward_compute_in_their_slot_unless_they_would_notice() -> None:
    assert run_on(2, _classes) == [("Plain", "Registered", True, [])] * 2
