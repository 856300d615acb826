"""Runs of Lightning's `Trainer` on a sharded module, with what its strategies may lose.

    torchrun --nproc-per-node=2 tests/integrations/lightning_runs.py OUT

Writes the losses of each run, or its error, to OUT/runs.json.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.integrations.lightning import Strategy


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A generator and a discriminator, of which automatic optimization trains the first."""

    def __init__(self, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 1))
        self.discriminator = nn.Linear(1, 1)
        self.automatic_optimization = not is_manual
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.generator(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = self.discriminator(self(x)).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
            self.losses.append(loss.item())
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)  # also those that are not used
        if self.automatic_optimization:
            return optimizer
        modules = (self.generator, self.discriminator)
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]


class Activating(LayerSync):  # type: ignore[misc]
    """A plugin in place of `sync_batchnorm`, which needs a GPU."""

    def apply(self, model: Any) -> Any:
        model.generator[1] = nn.Tanh()
        return model

    def revert(self, model: Any) -> Any:
        return model


def fit(module: Module, out: Path, resumed: Path | None = None, **options: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(16, n, generator=generator) for n in (4, 1)))
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        **{"strategy": Strategy(units=nn.Linear), **options},
    )
    trainer.fit(module, DataLoader(data, 2), ckpt_path=resumed)
    return module.losses


def refused(run: Callable[[], list[float]]) -> str:
    try:
        run()
    except sw.StepError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    out = Path(sys.argv[1])
    ddp: Any = {"strategy": "ddp_find_unused_parameters_true"}
    whole: Any = {"strategy": Strategy()}
    runs = {
        "ours": fit(Module(), out / "ours"),
        "resumed": fit(Module(), out / "resumed", out / "ours" / "epoch=0.ckpt"),
        "ddp": fit(Module(), out / "ddp", **ddp),
        "plugin": fit(Module(), out / "plugin", plugins=[Activating()]),
        "manual": fit(Module(is_manual=True), out / "manual"),
        "manual replicas": fit(
            Module(is_manual=True), out / "replicas", strategy=Strategy(strategy="ddp")
        ),
        "manual ddp": fit(Module(is_manual=True), out / "manual-ddp", **ddp),
        "refused": refused(lambda: fit(Module(is_manual=True), out / "refused", **whole)),
    }
    if torch.distributed.get_rank() == 0:
        (out / "runs.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()
