"""Shards on the host: numbers are the same, and device memory is as planned."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.plan.strategy import PRESETS
from shardwise.runtime.codecs import HostCodec
from tests.covering import covered_first
from tests.models import CASES, LIKE_OTHERS, Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_training,
    options_of,
    own_part,
    runtime_of,
)

POLICIES = {
    "all": sw.CPUOffloadPolicy(),
    "but parameters": sw.CPUOffloadPolicy(parameters=False),
    "stepped on the device": sw.CPUOffloadPolicy(step="device"),
}


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "name", "policy"),
    covered_first(product(PRESETS, ("gpt", "unused and reused", "lora", "stack"), POLICIES)),
)
def test_every_strategy_trains_as_in_one_process(strategy: str, name: str, policy: str) -> None:
    options = options_of(strategy) | {"offload_policy": POLICIES[policy]}
    if name == "stack":
        options |= {"accumulate": 2, "clip": 0.01, "set_to_none": False}
    assert_equal_training(name, **options)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "policy"), covered_first(product(CASES, POLICIES), leave=LIKE_OTHERS)
)
def test_every_model_trains_as_in_one_process(name: str, policy: str) -> None:
    assert_equal_training(name, offload_policy=POLICIES[policy])


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_options_change_no_number(policy: str) -> None:
    assert_equal_training("tied", offload_policy=POLICIES[policy], prefetch=0, accumulate=3)
    assert_equal_training("stack", offload_policy=POLICIES[policy], reshard_after_forward=False)


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_values_that_the_user_changes_are_brought(policy: str) -> None:
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units="auto", offload_policy=POLICIES[policy])
    batch = CASES["stack"].batch(4)
    for factor in (1.0, 0.5, 2.0):
        for one in (reference, model):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(factor)
        with torch.no_grad():
            torch.testing.assert_close(model(batch), reference(batch), rtol=1e-12, atol=0.0)
        with sw.gathered(model, write_back=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.125)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.125)
        torch.testing.assert_close(model(batch), reference(batch), rtol=1e-12, atol=0.0)


@on_ranks(2)
def test_an_exception_leaves_nothing_under_way() -> None:
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units="auto", offload_policy=POLICIES["all"])
    batch = CASES["stack"].batch(4)
    _loss(model, own_part(batch)).backward()  # the next gradients are added to these

    def fail(_gradient: Tensor) -> None:
        raise ValueError("in backward")

    def plant(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    assert isinstance(model, Stack)
    hook = model.layers[0].register_forward_hook(plant)
    with pytest.raises((ValueError, sw.PeerAborted)):
        _loss(model, own_part(batch)).backward()
    hook.remove()
    model.zero_grad()
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    _loss(reference, batch).backward()
    _loss(model, own_part(batch)).backward()
    for unit in runtime_of(model).units:
        for flat in unit.flats:
            assert isinstance(flat.codec, HostCodec)
            assert flat.codec.offloader.staging.allocated_bytes == 0
    assert runtime_of(model).pools.of_gradients.allocated_bytes == 0
    for optimizer in optimizers:
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p, q, name)


@on_ranks(2)
def test_blocks_may_stay_on_the_device() -> None:
    reference, model = build("stack"), build("stack")
    assert isinstance(model, Stack)
    for layer in model.layers:
        sw.fully_shard(layer)
    sw.fully_shard(model, offload_policy=POLICIES["all"])
    offloaded = {unit.label: unit.offload is not None for unit in runtime_of(model).plan.units}
    assert offloaded == {"Stack": True} | {f"layers.{i}": False for i in range(3)}
    batch = CASES["stack"].batch(4)
    _loss(reference, batch).backward()
    _loss(model, own_part(batch)).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name)


def _loss(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean()
