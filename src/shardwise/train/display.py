"""The output of a run for people: what rank 0 prints, and loss.png."""

import signal as signals
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.train.config import Config
from shardwise.train.data import Corpus, Entropies
from shardwise.train.loop import Summary
from shardwise.train.memory import Footprint, forecast_step, process_footprint, rank_footprint
from shardwise.train.run_directory import RunDirectory
from shardwise.train.sinks import Record

__all__ = ["Display", "ProgressSink", "draw_losses", "memory_table", "units_table"]


class Display:
    """Prints the start and the end of a run."""

    def __init__(self, console: Console, config: Config, run: RunDirectory) -> None:
        self.console = console
        self._config = config
        self._run = run

    def show_start(self, corpus: Corpus, plan: Plan, device: str) -> None:
        config, num_ranks = self._config, self._config.shard.nproc
        self.say(f"{config.run.name}: {corpus}")
        ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'} on {device}"
        self.say(f"{ranks}, strategy {plan.strategy.name}, prefetch {plan.prefetch}")
        self.console.print(units_table(plan))
        rank = rank_footprint(plan, forecast_step(plan, config, device))
        self.console.print(
            memory_table("memory (forecast)", rank, process_footprint(plan), num_ranks)
        )
        if self._run.checkpoint is not None:
            self.say(f"resuming after step {self._run.step}: {self._run.checkpoint}")

    def show_stop(self, signal: int, step: int) -> None:
        self.say(
            f"stopped by {signals.Signals(signal).name} after step {step} of "
            f"{self._config.train.steps}, which is saved; to resume: "
            f"shardwise train {self._run.config}"
        )

    def show_end(self, summary: Summary, entropies: Entropies) -> None:
        self.say(
            f"training loss {summary.loss:.3f} (mean of the last {summary.loss_steps} steps), "
            f"validation loss {summary.validation_loss:.3f}, in nats per byte"
        )
        self.say(
            f"to compare: uniform {entropies.uniform:.2f}, unigram entropy "
            f"{entropies.unigram:.2f}, bigram entropy {entropies.bigram:.2f}"
        )
        if self._config.sample.bytes:
            self.console.print(Panel(Text(summary.sample), title="sample", title_align="left"))
        num_ranks = self._config.shard.nproc
        self.console.print(
            memory_table("memory (measured)", summary.rank, summary.process, num_ranks)
        )
        low, high = (decimal(f(summary.resident_peaks)) for f in (min, max))
        peak = low if low == high else f"{low} to {high}"
        self.say(f"peak resident memory of a rank, with libraries and activations: {peak}")
        speed = f"{summary.tokens:,} tokens at {summary.tokens_per_second:,.0f} tokens/s"
        overlap = f"; {summary.overlapped_share:.0%} of the gather time overlapped with compute"
        self.say(speed + (overlap if num_ranks > 1 else ""))

    def show_files(self) -> None:
        files = ", ".join(sorted(file.name for file in self._run.path.iterdir()))
        self.say(f"run directory: {self._run.path} ({files})")

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class ProgressSink:
    """A progress bar on a terminal; elsewhere a line for every ``log_every``-th step."""

    def __init__(self, console: Console, steps: int, log_every: int) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._time_left = TimeRemainingColumn()
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[metrics]}"),
            self._time_left,
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=steps, metrics="starting")
        self._progress.start()

    def log(self, record: Record) -> None:
        norm = "" if record.grad_norm is None else f"  grad norm {record.grad_norm:.2f}"
        metrics = f"loss {record.loss:.3f}  {record.tokens_per_second:,.0f} tokens/s{norm}"
        self._progress.update(self._task, completed=record.step, metrics=metrics)
        is_logged = record.step in (1, self._steps) or record.step % self._log_every == 0
        if is_logged and not self._console.is_terminal:
            left = self._time_left.render(self._progress.tasks[self._task])
            self._print(f"step {record.step}/{self._steps}  {metrics}  {left} left")
        if record.validation_loss is not None:
            self._print(f"step {record.step}: validation loss {record.validation_loss:.3f}")

    def close(self) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def units_table(plan: Plan) -> Table:
    """The units, with their gathered bytes and the bytes of one rank's shards."""
    table = _table("unit", "parameters", "gathered", "shard of a rank")
    for _, group in groupby(plan.units, key=_sizes):
        units = list(group)  # equal ones, so that a deep model fits on a screen
        num_elements, gathered_bytes, shard_bytes = _sizes(units[0])
        times = "" if len(units) == 1 else f"{len(units)} x "
        last = "" if len(units) == 1 else f" to {units[-1].label}"
        table.add_row(
            units[0].label + last,
            f"{times}{num_elements:,}",
            times + decimal(gathered_bytes),
            times + decimal(shard_bytes),
        )
    table.add_section()
    whole, kept = decimal(plan.parameter_bytes), decimal(plan.shard_bytes)
    table.add_row("model", f"{plan.num_parameters:,}", whole, kept)
    return table


def _sizes(unit: UnitPlan) -> tuple[int, int, int]:
    num_elements = sum(spec.num_elements for spec in unit.parameters)
    return num_elements, unit.gathered_bytes, unit.shard_bytes


def memory_table(title: str, rank: Footprint, process: Footprint, num_ranks: int) -> Table:
    """The bytes of one rank next to those of one process without sharding."""
    table = _table(title, f"a rank (of {num_ranks})", "one process")
    rows = {
        "parameters": "parameters",
        "gradients": "gradients",
        "AdamW's two states": "optimizer",
        "gathered units and gradients, at the peak": "transient",
    }
    for label, name in rows.items():
        table.add_row(label, decimal(getattr(rank, name)), decimal(getattr(process, name)))
    table.add_section()
    table.add_row("total", decimal(rank.total), decimal(process.total))
    if rank.host:
        table.add_row("offloaded to the host", decimal(rank.host), decimal(process.host))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


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
    points = list(validation), list(validation.values())
    axes.plot(*points, "o-", color="tab:orange", label="validation")
    for name in ("unigram", "bigram"):
        entropy = getattr(entropies, name)
        axes.axhline(entropy, color="tab:gray", linestyle="--", linewidth=1)
        text, end = f"{name} entropy {entropy:.2f}", (steps[-1], entropy)
        axes.annotate(text, end, ha="right", va="bottom")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path)


def running_mean(values: Sequence[float]) -> NDArray[np.float64]:
    """The mean around each value, over a fiftieth of the run and over less towards its ends.

    A mean of the past alone would lag behind the steep first steps.
    """
    index = np.arange(len(values))
    to_end = np.minimum(index, index[::-1])
    reach = np.minimum(max(1, len(values) // 100), to_end)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means: NDArray[np.float64] = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    return means
