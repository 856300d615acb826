"""Train under every strategy and print losses and norms: run by `test_without_parts`.

``torchrun --nproc-per-node 2 tests/without_parts.py``
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
GRANULARITIES = ("element", "row", "dim")


class Block(nn.Module):
    """A residual block of odd sizes."""

    def __init__(self, size: int = 33) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(size, 64), nn.Linear(64, size, bias=False), nn.LayerNorm(size)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + inner


def train(strategy: str, granularity: Any) -> list[float]:
    """Return the loss of each step, summed over ranks, and the last norm of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(33, 5)).double()
    mesh = init_device_mesh("cpu", (2,))
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sw.fully_shard(model, units={Block}, strategy=strategy, granularity=granularity, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = []
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(8, 33, generator=generator, dtype=torch.float64)
            loss = model(x).square().mean()
            loss.backward()
        norm = sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        numbers += [total.item(), float(norm)]
    return numbers


def train_all() -> dict[str, list[float]]:
    """`train` with all strategies and granularities."""
    pairs = [(strategy, granularity) for strategy in STRATEGIES for granularity in GRANULARITIES]
    return {" ".join(pair): train(*pair) for pair in pairs}


def main() -> None:
    """Print the numbers as JSON, on rank 0."""
    dist.init_process_group("gloo")
    numbers = train_all()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(numbers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
