"""A loop with Lightning's Fabric on a sharded model: accumulation, clipping, a checkpoint.

    torchrun --nproc-per-node=2 examples/lightning/fabric.py OUT [--engine ddp]

Compared with a program that uses DDP, two lines change: the strategy, and the optimizer, which is
built from the model that `setup` returned.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.integrations.lightning import FabricStrategy

PARTS = 2  # micro-batches per step


def main(out: Path, engine: str) -> list[tuple[float, float]]:
    """Train; return the loss and the gradient norm of each step."""
    strategy = "ddp" if engine == "ddp" else FabricStrategy(units=nn.Linear)
    fabric = Fabric(strategy=strategy, devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    fabric.seed_everything(0)
    layers = (nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = fabric.setup(nn.Sequential(*layers))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    history = []
    total = torch.zeros((), device=fabric.device)
    for index, (x, y) in enumerate(loader):
        last = (index + 1) % PARTS == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = (model(x) - y).square().mean() / PARTS
            fabric.backward(loss)
        total += loss.detach()
        if not last:
            continue
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(fabric.all_reduce(total, reduce_op="mean")), float(norm)))
        total = torch.zeros_like(total)
        state = {"model": model, "optimizer": optimizer, "step": len(history)}
        if len(history) == 3:
            fabric.save(out / "checkpoint", state)
        if len(history) == 4:  # the reloaded checkpoint undoes this step
            fabric.load(out / "checkpoint", state)
            assert state["step"] == 3
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    options = parser.parse_args()
    history = main(options.out / options.engine, options.engine)
    if torch.distributed.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history))
    torch.distributed.destroy_process_group()
