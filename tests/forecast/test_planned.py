"""Tests that the printed call of `fully_shard` makes the plan of its configuration."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    Configuration(shard_size=2, accumulation=4, reproducible=8),
    Configuration(shard_size=2, compute_dtype=torch.float32, wire=sw.Wire("int8", "int4")),
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


class Counted(nn.Module):
    """Returns the mean of its blocks' outputs, and counts their forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.double()
        self.num_forwards = 0
        for block in self.blocks:
            block.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_forwards += 1

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


@on_ranks(2)
@pytest.mark.parametrize(
    ("accumulate", "checkpointing", "forwards"),
    [("shards", "full", 2), ("whole", ("none", "full", "products"), 5 / 3)],
)
def test_the_printed_step_trains_as_planned(
    accumulate: Any, checkpointing: Any, forwards: float
) -> None:
    dtypes: Any = dict.fromkeys(("master_dtype", "compute_dtype", "reduce_dtype"), torch.float64)
    configuration = Configuration(
        shard_size=2, micro_batch=2, accumulation=3, accumulate=accumulate,
        checkpointing=checkpointing, activation_offload=True, **dtypes,
    )  # fmt: skip
    model, reference = Counted(), Counted()
    names: dict[str, Any] = {"model": model}
    exec(call_of(configuration), names)
    tokens = torch.arange(3 * 2 * 2 * 5).view(3, 2, 2, 5) % 10  # [micro-batches, ranks, 2, time]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(sw, "offload_activations", wraps=sw.offload_activations) as offload:
        names["train_step"](sgd, [(batch,) for batch in tokens[:, dist.get_rank()]])
    assert offload.call_count == 3
    assert model.num_forwards == 3 * 3 * forwards, "of 3 blocks in 3 micro-batches"
    reference(tokens.flatten(0, 2)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with sw.gathered(model):
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


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
        Configuration(strategy="ddp", replicas=2, context=2),
        Configuration(strategy="hfsdp", shard_size=2, replicas=2, offload="parameters"),
    ],
    ids=str,
)
def test_the_call_has_the_mesh_of_model_parallelism(
    configuration: Configuration,
) -> None:
    model = build(configuration.master_dtype)
    expected = plan_of(model, configuration)
    call = call_of(configuration).replace('"cuda"', '"cpu"')
    exec(call, {"sw": sw, "torch": torch, "model": model})
    assert handle_of(model).runtime.plan == expected


def test_ddp_is_over_all_data_parallel_ranks_and_those_of_a_sequence() -> None:
    model = build()
    expected = plan_of(model, Configuration(strategy="ddp", replicas=8))
    assert (expected.num_ranks, expected.world_size) == (8, 1)
    for configuration in (
        Configuration(strategy="ddp", shard_size=8),
        Configuration(strategy="ddp", replicas=2, context=4),
        Configuration(strategy="ddp", shard_size=2, context=4),
    ):
        assert plan_of(model, configuration) == expected


def test_the_call_is_written_as_a_user_would() -> None:
    configuration = Configuration(strategy="hsdp", shard_size=8, replicas=4, offload="optimizer")
    assert call_of(configuration) == (
        "import torch\n"
        "\n"
        "import shardwise as sw\n"
        "\n"
        "sw.fully_shard(\n"
        "    model,\n"
        '    units="auto",\n'
        '    strategy="hsdp",\n'
        "    sharding_factor=8,\n"
        "    mp_policy=sw.MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32),\n"
        "    offload_policy=sw.CPUOffloadPolicy(parameters=False),\n"
        ")\n"
        "\n"
        "\n"
        "def train_step(optimizer, micro_batches):\n"
        '    """Train a rank on 1 micro-batch of 1 sequence, with the states of adamw."""\n'
        "    (micro_batch,) = micro_batches\n"
        "    loss = model(*micro_batch)  # its mean over the micro-batch\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )


def test_model_parallelism_has_a_mesh() -> None:
    call = call_of(Configuration(shard_size=4, tensor=8, pipeline=2))
    assert call.startswith(
        "import torch\n\nimport shardwise as sw\n"
        "from torch.distributed.device_mesh import init_device_mesh\n\n"
        'mesh = init_device_mesh("cuda", (2, 4, 8), mesh_dim_names=("pp", "dp", "tp"))\n'
        'sw.fully_shard(\n    model,\n    mesh=mesh["dp"],\n'
    )
