"""Shards on the host: numbers are the same, and device memory is as planned."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.runtime.codecs import HostCodec
from tests.models import CASES, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_equal_steps,
    own_part,
    rows,
    runtime_of,
    sharded_pair,
    squares,
)

POLICIES = {
    "all": sw.CPUOffloadPolicy(),
    "but parameters": sw.CPUOffloadPolicy(parameters=False),
    "stepped on the device": sw.CPUOffloadPolicy(step="device"),
}


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_values_that_the_user_changes_are_brought(policy: str) -> None:
    reference, model = sharded_pair("stack", units="auto", offload_policy=POLICIES[policy])
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
    reference, model = sharded_pair("stack", units="auto", offload_policy=POLICIES["all"])
    squares(model, own_part(rows())).backward()  # the next gradients are added to these

    def fail(_gradient: Tensor) -> None:
        raise ValueError("in backward")

    def plant(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    hook = model.layers[0].register_forward_hook(plant)
    with pytest.raises((ValueError, sw.PeerAborted)):
        squares(model, own_part(rows())).backward()
    hook.remove()
    assert_equal_steps(model, reference, 1, zeroes=True)
    for unit in runtime_of(model).units:
        for flat in unit.flats:
            assert isinstance(flat.codec, HostCodec)
            assert flat.codec.offloader.staging.allocated_bytes == 0
    assert runtime_of(model).pools.of_gradients.allocated_bytes == 0
    assert_equal_steps(model, reference, 2, make_optimizer=adamw)


@on_ranks(2)
def test_blocks_may_stay_on_the_device() -> None:
    reference, model = build("stack"), build("stack")
    for layer in model.layers:
        sw.fully_shard(layer)
    sw.fully_shard(model, offload_policy=POLICIES["all"])
    offloaded = {unit.label: unit.offload is not None for unit in runtime_of(model).plan.units}
    assert offloaded == {"Stack": True} | {f"layers.{i}": False for i in range(3)}
    assert_equal_steps(model, reference, 1)
