"""Lightning's `Trainer` on a sharded module: validation, a checkpoint, a resumed run.

    torchrun --nproc-per-node=2 examples/lightning/fit.py OUT [--engine ddp]

Compared with a program that uses DDP, one line changes: the strategy.
"""

import argparse
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.integrations.lightning import Strategy


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("validation", loss, sync_dist=True)

    def on_train_batch_end(self, *_) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(out: Path, engine: str, epochs: int, resumed: Path | None = None) -> Regression:
    module = Regression()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(48, n, generator=generator) for n in (16, 1)))
    trainer = lightning.Trainer(
        strategy="ddp" if engine == "ddp" else Strategy(units=nn.Linear),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[ModelCheckpoint(out, filename="{epoch}", save_last=True)],
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 8), ckpt_path=resumed)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    options = parser.parse_args()
    out = options.out / options.engine
    losses = fit(out, options.engine, 2).losses
    losses += fit(out, options.engine, 3, resumed=out / "last.ckpt").losses
    if torch.distributed.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()
