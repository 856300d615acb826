"""Where the metrics of a run go: metrics.jsonl, loss.png, TensorBoard, Weights & Biases."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TextIO

from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.data import Entropies

__all__ = [
    "JsonLines",
    "Record",
    "Sink",
    "TensorBoard",
    "WandB",
    "check_trackers",
    "draw_losses",
    "open_trackers",
]


@dataclass(frozen=True, slots=True)
class Record:
    """The metrics of one step; losses are means over the global batch, in nats per byte."""

    step: int  # from 1
    loss: float
    grad_norm: float | None  # before clipping; None with memory.step_in_backward
    lr: float
    tokens: int  # since the first step
    tokens_per_second: float  # of this step, over all ranks
    seconds: float  # since the first step, validation included
    validation_loss: float | None = None  # after this step, if it was validated
    loss_scale: float | None = None  # in float16; halved after a skipped step

    def metrics(self) -> dict[str, float]:
        """All values but None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Sink(Protocol):
    """Receives the metrics of each step, on rank 0."""

    def log(self, record: Record) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Called once, after the last step or an error."""


class JsonLines:
    """One JSON object per step, flushed, so that a killed run leaves its steps."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def log(self, record: Record) -> None:
        self._file.write(json.dumps(record.metrics()) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars for ``tensorboard --logdir``."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)

        self._writer = SummaryWriter(str(directory))

    def log(self, record: Record) -> None:
        for name, value in record.metrics().items():
            if name != "step":
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; its environment variables configure the project and the mode."""

    def __init__(self, directory: Path, name: str, config: dict[str, Any]) -> None:
        import wandb  # noqa: PLC0415 (optional)

        self._run = wandb.init(
            dir=str(directory), name=name, id=directory.name, resume="allow", config=config
        )

    def log(self, record: Record) -> None:
        self._run.log(record.metrics(), step=record.step)

    def close(self) -> None:
        self._run.finish()


def draw_losses(path: Path, title: str, records: Sequence[Record], entropies: Entropies) -> None:
    """Draw the losses, their running mean, the validation losses and the entropies.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and takes a second)

    axes = (figure := Figure(figsize=(9, 5), dpi=120, layout="constrained")).add_subplot()
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, running_mean(losses), color="tab:blue", label="training")
    validation = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    axes.plot(list(validation), list(validation.values()), "o-", label="validation")
    for name in ("unigram", "bigram"):
        entropy = getattr(entropies, name)
        axes.axhline(entropy, color="tab:gray", linestyle="--", linewidth=1)
        axes.annotate(f"{name} entropy {entropy:.2f}", (0, entropy), va="bottom")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean around each value, over a fiftieth of the run and over less towards its ends.

    A mean of the past alone would lag behind the steep first steps.
    """
    half = max(1, len(values) // 100)
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = sums[index + reach + 1] - sums[index - reach]
        means.append(window / (2 * reach + 1))
    return means


def open_trackers(config: Config, directory: Path) -> list[Sink]:
    """The sinks of ``run.sinks``, whose packages `check_trackers` has found."""
    sinks: list[Sink] = []
    if "tensorboard" in config.run.sinks:
        sinks.append(TensorBoard(directory / "tensorboard"))
    if "wandb" in config.run.sinks:
        sinks.append(WandB(directory, config.run.name, config.model_dump()))
    return sinks


def check_trackers(config: Config) -> None:
    """Raise a ConfigError if a package of ``run.sinks`` is not installed."""
    for name in config.run.sinks:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'run.sinks: {name} is not installed; pip install "shardwise[log]"')
