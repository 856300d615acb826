"""Runs of Lightning's `Trainer` on a sharded module, with what its strategies may lose.

    torchrun --nproc-per-node=2 tests/integrations/lightning_runs.py OUT

Writes the losses of each run, or its error, to OUT/runs.json.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.integrations.lightning import FabricStrategy, Strategy
from tests.runtime.one_process import full


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


class Partial(Module):
    """Its checkpoints lack what is frozen, and have a tensor that a hook adds."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.generator[0]
        first.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n: x for n, x in state.items() if n[:11] != "generator.0"}
        last: Any = self.generator[2]
        checkpoint["added"] = last.weight.detach().clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses.append(full(checkpoint["added"]).norm().item())


def fit(
    module: Module,
    out: Path,
    resumed: Path | None = None,
    callbacks: Sequence[lightning.Callback] = (),
    **options: Any,
) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(16, n, generator=generator) for n in (4, 1)))
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(out, filename="{epoch}", save_top_k=-1), *callbacks],
        enable_progress_bar=False,
        **{"strategy": Strategy(units=nn.Linear), **options},
    )
    trainer.fit(module, DataLoader(data, 2), ckpt_path=resumed)
    return [*module.losses, *(full(p.detach()).norm().item() for p in module.parameters())]


def resume(out: Path, module: type[Module] = Module, **options: Any) -> list[list[float]]:
    """The numbers of a run, and of one that resumes after its first epoch."""
    callback = options.pop("callback", None)
    return [
        fit(module(), out, path, [callback()] if callback else [], **options)
        for path in (None, out / "epoch=0.ckpt")
    ]


def fabric_resumes(out: Path, strategy: Any) -> list[float]:
    """The losses of Fabric before and after a model with an unused parameter is loaded.

    With an average of the parameters, a schedule, and a load of another model that is not strict.
    """
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def build() -> tuple[Any, Any, Any]:
        model = fabric.setup(Module())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: Any, optimizer: Any, schedule: Any) -> float:
        loss = model(torch.full((2, 4), 1.0 + fabric.global_rank)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return float(fabric.all_reduce(loss.detach()))

    first = build()
    losses = [step(*first)]
    average = {name: p.detach().clone() for name, p in first[0].module.named_parameters()}
    names = ("model", "optimizer", "schedule")
    fabric.save(out, {**dict(zip(names, first, strict=True)), "average": average, "epoch": 3})
    second = build()
    state = {**dict(zip(names, second, strict=True)), "average": None, "epoch": 0}
    fabric.load(out, state)
    losses += [step(*one) for one in (first, second)]
    losses += [full(average["generator.0.weight"]).norm().item()]
    losses += [full(state["average"]["generator.0.weight"]).norm().item(), state["epoch"]]
    module = Module()
    module.more = nn.Linear(2, 2)
    larger = fabric.setup(module)
    fabric.load(out, {"model": larger}, strict=False)
    return [*losses, full(larger.generator[0].weight.detach()).norm().item()]


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
        "from ddp": fit(Module(), out / "from-ddp", out / "ddp" / "epoch=0.ckpt"),
        "fabric": fabric_resumes(out / "fabric", FabricStrategy(units=nn.Linear)),
    }
    cases: dict[str, dict[str, Any]] = {
        "average": {"callback": lambda: EMAWeightAveraging(decay=0.5)},
        "swa": {"callback": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)},
        "partial": {"module": Partial},
    }
    for name, options in cases.items():
        runs[name] = resume(out / name, **options)
        runs[f"{name} ddp"] = resume(out / f"{name}-ddp", **options, **ddp)
    if torch.distributed.get_rank() == 0:
        (out / "runs.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()
