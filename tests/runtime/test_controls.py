"""Requests to a unit between its calls, and random numbers on shards."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.features.fsdp_module import UnshardHandle
from shardwise.runtime.module import register_forward_method
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import WIDTH, Block, Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_close, full, own_part, rank, world_size


def sharded(**options: Any) -> Any:
    return sw.fully_shard(build("stack"), units=Block, **options)


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    return own_part(whole)


def gathers(model: nn.Module) -> list[str]:
    names = sw.ledger(model).names()
    return [name for name in names if name.startswith("gather ")]


@on_ranks(2)
def test_a_unit_that_was_gathered_by_hand_is_not_gathered_again() -> None:
    model = sharded()
    for _ in range(2):
        model(batch()).sum().backward()
    usual = sorted(gathers(model))
    handle = model.layers[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert isinstance(next(model.layers[0].parameters()), ShardedTensor)
    handle.wait()
    handle.wait()
    assert not isinstance(next(model.layers[0].parameters()), ShardedTensor)
    model(batch()).sum().backward()
    assert sorted(gathers(model)) == usual


@on_ranks(2)
def test_a_unit_that_is_in_use_cannot_be_freed() -> None:
    model = sharded()
    model.layers[1].register_forward_pre_hook(lambda module, _args: module.reshard())
    model(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_units_that_stay_are_gathered_once() -> None:
    model = sharded()
    model.set_reshard_after_forward(False)
    for _ in range(2):
        model(batch()).sum().backward()
    assert len(gathers(model)) == len(set(gathers(model)))
    model.set_reshard_after_forward(True)
    model(batch()).sum().backward()
    assert len(gathers(model)) > len(set(gathers(model)))


@on_ranks(2)
def test_units_stay_gathered_between_micro_batches() -> None:
    model: Any = sharded()
    events = []
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for reduces in (False, False, True):
        model.set_requires_gradient_sync(reduces)
        model(batch()).sum().backward()
        events += gathers(model)
    assert len(events) == len(set(events)) > 1
    assert not sw.ledger(model).gathered_bytes


@pytest.mark.parametrize("granularity", ["element", "dim"])
@on_ranks(2)
def test_units_that_stay_gathered_follow_changes(granularity: Any) -> None:
    model, other = (sharded(granularity=granularity) for _ in range(2))
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for through_data in (False, True):
        for one in (model, other):
            one(batch()).sum().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    (parameter.data if through_data else parameter).mul_(2)
        with torch.no_grad():
            assert torch.equal(model(batch()), other(batch()))


def test_a_number_is_refused_after_the_fact() -> None:
    with pytest.raises(sw.PlanError, match="pass a number to fully_shard"):
        sharded().set_reshard_after_forward(2)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_gradients_divided_by_a_number(dtype: torch.dtype) -> None:
    averages, others = sharded(), sharded(mp_policy=sw.MixedPrecisionPolicy(reduce_dtype=dtype))
    for module in others.modules():
        if isinstance(module, sw.FSDPModule):
            module.set_gradient_divide_factor(0.5)
    for model in (averages, others):
        (model(batch()) / 64).sum().backward()
    for one, other in zip(averages.parameters(), others.parameters(), strict=True):
        expected, actual = full(one.grad) * 2 * world_size(), full(other.grad)
        if dtype == torch.float64:
            assert_close(actual, expected, "gradient")
        else:
            torch.testing.assert_close(actual, expected, rtol=4e-3, atol=1e-3)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the root", "on the meta device", "before a conversion"])
def test_what_is_set_stays(when: str) -> None:
    model: Any = build("stack")
    usual = sw.fully_shard(copy.deepcopy(model), units=Block)
    if when == "on the meta device":
        model = model.to("meta")
    for block in model.layers:
        sw.fully_shard(block)
        if when != "before a conversion":
            block.set_gradient_divide_factor(0.5)
    sw.fully_shard(model)
    if when == "on the meta device":
        model.to_empty(device="cpu").load_state_dict(usual.state_dict())
    if when == "before a conversion":
        for block in model.layers:
            block.set_gradient_divide_factor(0.5)
        model.float().double()
        usual.float().double()
    for one in (model, usual):
        one(batch()).sum().backward()
    for (name, one), other in zip(model.named_parameters(), usual.parameters(), strict=True):
        factor = 2 * world_size() if name.startswith("layers.") else 1
        assert_close(full(one.grad), full(other.grad) * factor, name)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_what_does_not_divide(factor: float) -> None:
    with pytest.raises(sw.PlanError, match="expected a positive number"):
        sharded().set_gradient_divide_factor(factor)


@on_ranks(2)
def test_a_method_gathers_also_in_a_copy() -> None:
    torch.manual_seed(0)
    model: Any = sw.fully_shard(Generator().double(), units=Block)
    with pytest.raises(sw.ShardedTensorError):
        model.generate(batch())
    register_forward_method(model, "generate")
    expected = batch() @ full(model.first.weight).T + full(model.first.bias)
    for one in (model, copy.deepcopy(model)):
        assert_close(one.generate(batch()).detach(), expected.detach(), "generated")
    with pytest.raises(sw.PlanError, match="has no method 'nothing'"):
        register_forward_method(model, "nothing")


@on_ranks(2)
def test_a_method_of_the_instance_gathers_also_in_a_copy() -> None:
    torch.manual_seed(0)
    model: Any = Generator().double()
    model.generate = MethodType(lambda self, x: 2 * self.first(x), model)
    sw.fully_shard(model, units=Block)
    model.twice = lambda x: 2 * model.first(x)
    for name in ("generate", "generate", "twice"):
        register_forward_method(model, name)
    expected = 2 * (batch() @ full(model.first.weight).T + full(model.first.bias))
    for generate in (model.generate, copy.deepcopy(model).generate, model.twice):
        assert_close(generate(batch()).detach(), expected.detach(), "generated")
    model.generate(batch()).sum().backward()
    assert model.first.weight.grad is not None


class Generator(Stack):
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return y


@on_ranks(2)
def test_a_model_whose_units_were_wrapped_since_is_copied_and_unfrozen() -> None:
    reference: Any = build("stack")
    frozen: Any = copy.deepcopy(reference)
    frozen.layers[0].requires_grad_(False)
    model: Any = sw.fully_shard(frozen, units=Block)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[0].requires_grad_(True)
    reference(torch.ones(2, WIDTH).double()).sum().backward()
    for one in (model, copy.deepcopy(model)):
        one.zero_grad()
        one(torch.ones(2, WIDTH).double()).sum().backward()
        for parameter, expected in zip(one.parameters(), reference.parameters(), strict=True):
            assert_close(full(parameter.grad), expected.grad, "gradient")
    del model.layers[0]
    with pytest.raises(sw.PlanError, match=r"layers\.0.* was removed after fully_shard"):
        copy.deepcopy(model)


@on_ranks(2)
def test_ignored_parameters_are_each_ranks_own() -> None:
    plain: Any = build("stack")
    with torch.no_grad():
        plain.first.weight.mul_(1 + rank())  # they may differ
    model: Any = sw.fully_shard(plain, units=Block, ignored_params={plain.first.weight})
    assert not isinstance(model.first.weight, ShardedTensor)
    assert isinstance(model.first.bias, ShardedTensor)
    x = batch()
    captured: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda _module, args, out: captured.extend((args[0], out)))
    zero = 0.0 * model(x).sum()
    (zero + captured[1].sum()).backward()
    expected = captured[0].sum(dim=0).expand_as(model.first.weight)
    assert_close(model.first.weight.grad, expected, "this rank's gradient")


@on_ranks(1, 2, 3)
def test_random_numbers_are_those_of_one_process() -> None:
    model, plain = sharded(), build("stack")
    for one in (model, plain):
        torch.manual_seed(5)
        for parameter in one.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_uniform_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.1)
    for sharded_one, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(sharded_one), whole.detach())


@on_ranks(2)
def test_generators_that_differ_are_refused() -> None:
    model = sharded()
    torch.manual_seed(rank())
    with pytest.raises(sw.ShardedTensorError, match="generators in the same state"):
        nn.init.normal_(model.first.weight)


@on_ranks(2)
def test_where_parameters_lie() -> None:
    weight = sharded().first.weight
    (placement,) = weight.placements
    cut, size = weight.sharding.runs[0].stop, weight.numel()
    assert str(placement) == f"RaggedShard(0:{cut}, {cut}:{size})"
    assert weight.device_mesh.size() == 2
    whole = sharded(strategy="ddp").first.weight
    assert [str(one) for one in whole.placements] == ["R"]
