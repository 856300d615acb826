"""Tests that the printed call of `fully_shard` makes the plan of its configuration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.planned import call_of, plan_of
from shardwise.runtime.module import handle_of
from tests.ranks import on_ranks

CONFIGURATIONS = (
    Configuration(shard_size=2),
    Configuration(strategy="hsdp", shard_size=1, replicas=2, compute_dtype=torch.float32),
    Configuration(strategy="hfsdp", shard_size=1, replicas=2, prefetch=2),
    Configuration(strategy="zero1", shard_size=2, offload="optimizer"),
    Configuration(strategy="ddp", replicas=2, autocast=True),
    Configuration(shard_size=2, reshard_after_forward=False, offload="parameters"),
    Configuration(
        strategy="zero2",
        shard_size=2,
        master_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
    ),
)


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
    return nn.Sequential(nn.Embedding(10, 8), nn.ModuleList(blocks)).to(dtype)


@on_ranks(2)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_call_makes_the_plan(configuration: Configuration) -> None:
    model = build(configuration.master_dtype)
    expected = plan_of(model, configuration)
    exec(call_of(configuration), {"sw": sw, "torch": torch, "model": model})
    found = handle_of(model).runtime.plan
    assert found == expected


@on_ranks(4)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(shard_size=2, context=2),
        Configuration(shard_size=2, tensor=2),
        Configuration(shard_size=2, pipeline=2, strategy="zero2"),
        Configuration(tensor=2, pipeline=2, compute_dtype=torch.float32),
        Configuration(strategy="hsdp", shard_size=2, replicas=2),
        Configuration(strategy="hsdp", replicas=2, context=2),
        Configuration(strategy="hfsdp", shard_size=2, replicas=2, offload="parameters"),
    ],
    ids=str,
)
def test_the_call_trains_on_a_mesh_with_model_parallelism(
    configuration: Configuration,
) -> None:
    model: Any = build(configuration.master_dtype)
    expected = plan_of(model, configuration)
    call = call_of(configuration).replace('"cuda"', '"cpu"')
    exec(call, {"sw": sw, "torch": torch, "model": model})
    assert handle_of(model).runtime.plan == expected
    optimizer = torch.optim.AdamW(model.parameters())
    embedding, blocks = model[0], model[1]
    before = [local_of(parameter).clone() for parameter in model.parameters()]

    def forward(_model: nn.Module, tokens: Tensor) -> Tensor:
        x = embedding(tokens)
        for block in blocks:
            x = x + block(x)
        loss: Tensor = x.float().square().mean()
        return loss

    model.forward = forward.__get__(model)
    model(torch.zeros(2, 4, dtype=torch.long)).backward()
    optimizer.step()
    after = [local_of(parameter) for parameter in model.parameters()]
    assert any((a != b).any() for a, b in zip(after, before, strict=True) if len(a))


def local_of(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def test_the_call_is_written_as_a_user_would() -> None:
    configuration = Configuration(strategy="hsdp", shard_size=8, replicas=4, offload="optimizer")
    assert call_of(configuration) == (
        "sw.fully_shard(\n"
        "    model,\n"
        '    units="auto",\n'
        '    strategy="hsdp",\n'
        "    sharding_factor=8,\n"
        "    mp_policy=sw.MixedPrecisionPolicy(\n"
        "        param_dtype=torch.bfloat16,\n"
        "        reduce_dtype=torch.float32,\n"
        "    ),\n"
        "    offload_policy=sw.CPUOffloadPolicy(parameters=False),\n"
        ")"
    )


def test_model_parallelism_has_a_mesh() -> None:
    call = call_of(Configuration(shard_size=4, tensor=8, pipeline=2))
    assert call.startswith(
        "from torch.distributed.device_mesh import init_device_mesh\n\n"
        'mesh = init_device_mesh("cuda", (2, 4, 8), mesh_dim_names=("pp", "dp", "tp"))\n'
        'sw.fully_shard(\n    model,\n    mesh=mesh["dp"],\n'
    )
