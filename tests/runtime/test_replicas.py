"""C2: replicas keep the same bits in parameters and optimizer states."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.plan.strategy import STRATEGIES, Strategy
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import WIDTH, Block
from tests.ranks import run_on
from tests.runtime.modules import Experts
from tests.runtime.one_process import own_part, runtime_of

PRESETS = {strategy.name: strategy for strategy in STRATEGIES.values()}
STEPS, FEW_STEPS = 50, 12


@pytest.mark.parametrize(
    ("preset", "steps"),
    [
        *((name, FEW_STEPS) for name in ("ddp", "hsdp")),
        *(pytest.param(name, STEPS, marks=pytest.mark.thorough) for name in PRESETS),
    ],
)
def test_replicas_are_bitwise_equal_after_many_steps(preset: str, steps: int) -> None:
    trained = run_on(4, _train, PRESETS[preset], steps)
    shards, wholes = zip(*trained, strict=True)
    assert len(set(wholes)) == 1, "what is gathered is the same everywhere"
    by_shard: dict[int, set[str]] = {}
    for number, digest in shards:
        by_shard.setdefault(number, set()).add(digest)
    assert all(len(digests) == 1 for digests in by_shard.values())
    replicas = {"ddp": 4, "hsdp": 2}.get(preset)
    if replicas is not None:
        assert len(by_shard) == 4 // replicas


def _train(strategy: Strategy, steps: int) -> tuple[tuple[int, str], str]:
    """Train in float32, with rows whose content determines the expert."""
    options: dict[str, Any] = {"strategy": strategy}
    if strategy.num_axes > 1:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Block(), Experts(), Block(), Experts())
    sw.fully_shard(model, units={Block, Experts}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(own_part(torch.randn(24, WIDTH))).square().mean().backward()
        sw.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    states = [t for s in optimizer.state.values() for t in s.values()]
    kept = _digest([*model.parameters(), *states])
    with sw.gathered(model):
        whole = _digest(list(model.parameters()))
    return (runtime_of(model).mesh.rank, kept), whole


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
        digest.update(local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
