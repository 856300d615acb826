"""Train under every strategy and print losses and norms: run by `test_without_parts`.

``python tests/without_parts.py`` forks the second of two ranks, so that torch is imported once.
"""

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # for both ranks: the first optimizer would import it
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
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
    for _ in range(2):
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


def train_rank(rank: int, pipe: Connection) -> dict[str, list[float]]:
    """`train_all` as one of two ranks; the first sends the second the port of its store."""
    port = pipe.recv() if rank else 0
    store = TCPStore("localhost", port, 2, is_master=not rank, wait_for_workers=False)
    if not rank:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    numbers = train_all()
    dist.destroy_process_group()
    return numbers


def main() -> None:
    """Print the numbers of rank 0 as JSON."""
    assert callable(sw.fully_shard)  # imports the engine, for both ranks
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=train_rank, args=(1, theirs))
    other.start()
    numbers = train_rank(0, ours)
    other.join()
    if other.exitcode:
        sys.exit(f"rank 1 ended with {other.exitcode}")
    sys.stdout.write(json.dumps(numbers))


if __name__ == "__main__":
    main()
