"""Lightning with shardwise; a program for torchrun.

    torchrun --nproc-per-node=2 tests/fsdp/lightning_run.py OUT [--strategy fsdp] [--engine torch]
        [--full]

With ``--strategy model_parallel``, the default, `configure_model` shards the model, as Lightning
expects. With ``fsdp``, Lightning itself wraps it in FSDP1, which is replaced. Trains four steps,
saves a checkpoint (with ``--full``, one file of whole tensors), and resumes from it for two more.
Writes the losses to OUT/ENGINE.json.
"""

# mypy: disable-error-code="misc, no-any-return, arg-type, attr-defined"

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.fsdp.frameworks import replace_torch_fsdp

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.wide(self.norm(x)).relu())
        return x + y


class Regression(lightning.LightningModule):
    def __init__(self, sharded_by: str | None = None, full: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
        self.sharded_by = sharded_by  # None: Lightning shards it
        self.full = full  # whether checkpoints contain whole tensors
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = (self.model(x) - y).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ShardedRegression(Regression):
    """Shards its own model, for `ModelParallelStrategy`."""

    def configure_model(self) -> None:
        if isinstance(next(self.parameters()), torch.distributed.tensor.DTensor):
            return  # Lightning calls this for each `fit`
        mesh = self.device_mesh["data_parallel"]
        if self.sharded_by == "shardwise":
            # Lightning loads whole tensors with PyTorch's functions, which know FSDP2's placements.
            granularity = "dim" if self.full else "element"
            sw.fully_shard(self.model, mesh=mesh, units=Block, granularity=granularity)
            return
        for block in self.model[:-1]:
            torchs_fully_shard(block, mesh=mesh)
        torchs_fully_shard(self.model, mesh=mesh)


class AnyDeviceFSDP(FSDPStrategy):
    """A subclass, because Lightning requires a GPU for the strategy itself."""


def make_strategy(name: str, full: bool) -> Any:
    if name == "fsdp":
        kind: Any = "full" if full else "sharded"
        return AnyDeviceFSDP(auto_wrap_policy={Block}, state_dict_type=kind)
    size = int(os.environ["WORLD_SIZE"])
    return ModelParallelStrategy(size, tensor_parallel_size=1, save_distributed_checkpoint=not full)


def fit(name: str, engine: str, full: bool, steps: int, path: Path | None) -> lightning.Trainer:
    module = ShardedRegression(engine, full) if name == "model_parallel" else Regression()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(48, n, generator=generator) for n in (WIDTH, 1)))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=make_strategy(name, full),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=path)
    return trainer


def main(out: Path, strategy: str, engine: str, full: bool) -> list[float]:
    trainer = fit(strategy, engine, full, 4, None)
    losses: list[float] = trainer.lightning_module.losses
    trainer.save_checkpoint(out)
    resumed = fit(strategy, engine, full, 6, out)
    return losses + resumed.lightning_module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", choices=["model_parallel", "fsdp"], default="model_parallel")
    parser.add_argument("--engine", choices=["shardwise", "torch"], default="shardwise")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    if options.full and options.strategy == "fsdp":
        parser.error("Lightning's FSDPStrategy cannot load whole tensors into modules of DTensors")
    with contextlib.ExitStack() as stack:
        if (options.engine, options.strategy) == ("shardwise", "fsdp"):
            stack.enter_context(replace_torch_fsdp())
        losses = main(options.out / options.engine, options.strategy, options.engine, options.full)
    if torch.distributed.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()
