"""What a program sets on a parameter is on it, inside and outside of a forward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.fsdp import fully_shard
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.runtime.one_process import BATCH, assert_equal_models, full, own_part


def shard_by_fsdp2(model: nn.Module) -> nn.Module:
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp": lambda m: sw.fully_shard(m, units=Scaling),
    "ddp": lambda m: sw.fully_shard(m, units=Scaling, strategy="ddp"),
    "dim": lambda m: sw.fully_shard(m, units=Scaling, granularity="dim"),
    "the drop-in's FSDP2": shard_by_fsdp2,
}


class Scaling(nn.Module):
    """Reads an attribute of its weight, as muP does, and writes another, as float8 layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        vars(self.linear.weight)["width"] = 3
        vars(self.linear.bias)["_no_weight_decay"] = True

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.linear.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        y: Tensor = torch.tanh(self.linear(x)) / weight.width
        return y


def names_of(model: nn.Module) -> dict[str, Any]:
    names = ("width", "_no_weight_decay", "calls", "later")
    return {
        f"{parameter_name}.{name}": getattr(parameter, name)
        for parameter_name, parameter in model.named_parameters()
        for name in names
        if hasattr(parameter, name)
    }


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_attributes_are_carried_both_ways(way: str) -> None:
    reference: Any = nn.Sequential(Scaling(), Scaling()).double()
    model: Any = WAYS[way](copy.deepcopy(reference))
    for block in model:  # `deepcopy` drops them
        block.linear.weight.width, block.linear.bias._no_weight_decay = 3, True
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        for m, x in ((model, own_part(batch)), (reference, batch)):
            if step == 1:
                m[1].linear.bias.later = "set"
                del m[0].linear.bias._no_weight_decay
            m(x).square().mean().backward()
        assert_equal_models(model, reference, step)
        assert names_of(model) == names_of(reference)
        with sw.gathered(model):
            assert names_of(model) == names_of(reference)
            for m in (model, reference):
                m[0].linear.bias.later = step
        assert names_of(model) == names_of(reference)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_attributes_survive_sharding_and_conversion(way: str) -> None:
    model: Any = nn.Sequential(Scaling(), Scaling())
    expected = names_of(model)
    model = WAYS[way](model)
    assert names_of(model) == expected
    model.double()
    assert names_of(model) == expected
    model(own_part(torch.randn(BATCH, WIDTH).double())).sum().backward()
    assert names_of(model) == expected | {f"{n}.linear.weight.calls": 1 for n in (0, 1)}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_grad_dtype_is_that_of_sums_and_of_gradients(way: str) -> None:
    """Small gradients would vanish in sums of bfloat16."""

    def train(model: nn.Module, num_batches: int) -> nn.Module:
        for number in range(num_batches):
            batch = torch.full((BATCH, WIDTH), 1.0 if number == 0 else 2**-10).bfloat16()
            model(own_part(batch) if isinstance(model, sw.FSDPModule) else batch).sum().backward()
        return model

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16()
        model[0].weight.grad_dtype = torch.float32
        return model

    sharded = make()
    if way == "the drop-in's FSDP2":
        shard_by_fsdp2(sharded)
    else:
        chosen: dict[str, Any] = {"ddp": {"strategy": "ddp"}, "dim": {"granularity": "dim"}}
        policy = sw.MixedPrecisionPolicy(master_dtype="keep")
        sw.fully_shard(sharded, units=nn.Linear, mp_policy=policy, **chosen.get(way, {}))
    weight = next(sharded.parameters())
    assert (weight.dtype, weight.grad_dtype) == (torch.bfloat16, torch.float32)
    train(sharded, 2)
    gradient = weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    alone = next(train(make(), 2).parameters()).grad
    assert alone is not None
    assert alone.dtype == torch.float32
    assert not torch.equal(alone, alone.bfloat16().float()), "bfloat16 cannot hold the sum"
    assert torch.equal(full(gradient), alone / 2)  # the mean over two ranks
