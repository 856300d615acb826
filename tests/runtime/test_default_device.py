"""The engine's own tensors do not depend on torch's default device, such as a GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.ranks import on_ranks


def _bits(folder: Path, strategy: str, default: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = torch.randn(4, 6)
    factor = 2 if strategy == "hsdp" else None
    with default:  # operations on the meta device give no values
        sw.fully_shard(model, units=nn.Linear, strategy=strategy, sharding_factor=factor)
        optimizer = sw.optim.Adam8bit(model.parameters(), block=6, min_elements=1, state_bits=32)
        for _ in range(2):
            model(x).square().sum().backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sw.save(folder / default.type, model=model, optimizer=optimizer)
        sw.load(folder / default.type, model=model, optimizer=optimizer)
        return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@on_ranks(1, 4)
def test_training_and_checkpoints_do_not_depend_on_it(tmp_path: Path, strategy: str) -> None:
    if strategy == "hsdp" and torch.distributed.get_world_size() == 1:
        strategy = "ddp"
    expected = _bits(tmp_path, strategy, torch.device("cpu"))
    found = _bits(tmp_path, strategy, torch.device("meta"))
    assert all(map(torch.equal, expected, found))
