"""Destinations of the metrics of a run: metrics.jsonl, TensorBoard, Weights & Biases."""

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from shardwise.errors import PackageMissing
from shardwise.train.config import Config
from shardwise.train.plugins import resolve

__all__ = [
    "JsonLines",
    "Sink",
    "StepMetrics",
    "TensorBoard",
    "WandB",
    "check_trackers",
    "forget_run",
    "open_trackers",
    "read_history",
    "replace_text",
]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step; losses are means over the global batch, in nats per token."""

    step: int  # counted from 1
    loss: float
    grad_norm: float | None  # before clipping; None with memory.step_in_backward
    lr: float
    tokens: int  # total since the first step
    tokens_per_second: float  # speed of this step, over all ranks
    seconds: float  # time since the first step, including validation
    validation_loss: float | None = None  # after this step, if it was validated
    loss_scale: float | None = None  # in float16; halved after a skipped step
    mfu: float | None = None  # share of the devices' peak; see `utilization.flops_per_token`
    # The next two come from the run's recording; on a device they describe the previous step.
    exposed_seconds: float | None = None  # time compute waited for communication, mean over ranks
    slowest_rank: int | None = None  # the rank that the others wait for
    peak_memory_bytes: int | None = None  # maximum over ranks, since the process began
    free_memory_bytes: int | None = None  # minimum over ranks
    # The others describe the replicas of [replicas]; see `shardwise.recording.attendance.Change`.
    replicas: int | None = None  # how many counted in this step
    goodput: float | None = None  # share of the time of all replicas that was useful so far
    left: Sequence[int] = ()
    joined: Sequence[int] = ()
    repeats: int | None = None
    waited_seconds: float | None = None
    lost_seconds: float | None = None

    def metrics(self) -> dict[str, float]:
        """All numbers that are known."""
        return {name: v for name, v in asdict(self).items() if isinstance(v, int | float)}

    def known(self) -> dict[str, Any]:
        """All values that are known."""
        return {name: v for name, v in asdict(self).items() if v is not None and v != ()}


class Sink(Protocol):
    """Receives the metrics of each step on rank 0; built from configuration and run directory."""

    def log(self, record: StepMetrics) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Called once, after the last step or an error."""


class JsonLines:
    """Writes one JSON object per step and flushes it, so that a killed run keeps its steps."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def log(self, record: StepMetrics) -> None:
        self._file.write(json.dumps(record.known()) + "\n")

    def close(self) -> None:
        self._file.close()


def read_history(metrics: Path, last_step: int) -> tuple[StepMetrics, ...]:
    """The records of `JsonLines` up to ``last_step``, without truncated lines."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = []
    for line in lines:
        try:
            record = StepMetrics(**({"grad_norm": None} | json.loads(line)))  # None is not written
        except (ValueError, TypeError):  # the machine crashed while it was written
            continue
        if record.step <= last_step:
            records.append(record)
    return tuple(records)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically, even if the process is killed."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


class TensorBoard:
    """Writes scalars for ``tensorboard --logdir``."""

    def __init__(self, config: Config, directory: Path) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)

        trained = [record.step for record in read_history(directory / "metrics.jsonl", sys.maxsize)]
        # Steps from here on, which a killed or an overwritten run has left, are not shown.
        first = trained[-1] + 1 if trained else 0
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first)

    def log(self, record: StepMetrics) -> None:
        for name, value in record.metrics().items():
            if name != "step":
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


_RUN_OF_WANDB = "wandb-id"


class WandB:
    """Logs to Weights & Biases, whose environment variables configure the project and the mode."""

    def __init__(self, config: Config, directory: Path) -> None:
        import wandb  # noqa: PLC0415 (optional)

        file = directory / _RUN_OF_WANDB
        if not file.exists():
            # Directories of other runs may have the same name, which was the id in older versions.
            is_resumed = bool(read_history(directory / "metrics.jsonl", sys.maxsize))
            new = f"{directory.name}-{uuid.uuid4().hex[:12]}"
            replace_text(file, directory.name if is_resumed else new)
        self._run = wandb.init(
            dir=str(directory),
            name=config.run.name,
            id=file.read_text(encoding="utf-8"),
            resume="allow",
            config=config.model_dump(),
        )

    def log(self, record: StepMetrics) -> None:
        self._run.log(record.metrics(), step=record.step)

    def close(self) -> None:
        self._run.finish()


def forget_run(directory: Path) -> None:
    """Forget the ids by which trackers know the last run in ``directory``."""
    (directory / _RUN_OF_WANDB).unlink(missing_ok=True)


_TRACKERS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}


def open_trackers(config: Config, directory: Path) -> list[Sink]:
    """Open the sinks of ``run.sinks``, which `check_trackers` has checked."""
    return [_find(name)(config, directory) for name in config.run.sinks]


def check_trackers(config: Config) -> None:
    """Raise a ConfigError if a sink in ``run.sinks`` or a package that it needs is missing."""
    for name in config.run.sinks:
        _find(name)
        if name in _TRACKERS:
            PackageMissing.check(name, extra="log", needed_for="run.sinks")


def _find(name: str) -> Callable[[Config, Path], Sink]:
    """A built-in sink, an entry point in the group ``shardwise.sinks``, or a dotted name."""
    sink: Callable[[Config, Path], Sink] = resolve("run.sinks", name, _TRACKERS, "shardwise.sinks")
    return sink
