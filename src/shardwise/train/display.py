"""The human-readable output of a run: what rank 0 prints, and loss.png."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwise.errors import PackageMissing
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.recording.attendance import changes_of_replicas
from shardwise.train.build import memory_of
from shardwise.train.config import Config
from shardwise.train.data import Corpus
from shardwise.train.run_directory import RunDirectory
from shardwise.train.sinks import StepMetrics
from shardwise.train.summary import Summary

__all__ = ["Display", "ProgressSink", "draw_losses", "memory_table", "print_line", "units_table"]


class Display:
    def __init__(self, console: Console, config: Config, run: RunDirectory, corpus: Corpus) -> None:
        self.console = console
        self._config = config
        self._run = run
        self._corpus = corpus

    def show_start(self, plan: Plan, device: str) -> None:
        config, num_ranks = self._config, self._config.shard.nproc
        self.print_line(f"{config.run.name}: {self._corpus}")
        for line in self._corpus.truncations(config.model.context):
            self.print_line(line)
        ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'} on {device}"
        if config.shard.tensor > 1:
            ranks += f", {config.shard.tensor} of which divide each layer (units are a rank's part)"
        self.print_line(f"{ranks}, strategy {plan.strategy.name}, prefetch {plan.prefetch}")
        self.console.print(units_table(plan))
        rank, process = memory_of(config, device)
        self.console.print(memory_table("memory (forecast)", rank, process, num_ranks))
        if self._run.checkpoint is not None:
            self.print_line(f"resuming after step {self._run.step}: {self._run.checkpoint}")

    def show_end(self, summary: Summary, records: Sequence[StepMetrics]) -> None:
        self.print_line(
            f"training loss {summary.loss:.3f} (mean of the last {summary.loss_steps} steps), "
            f"validation loss {summary.validation_loss:.3f}, in nats per {self._corpus.unit}"
        )
        if self._config.sample.bytes:
            self.console.print(Panel(Text(summary.sample), title="sample", title_align="left"))
        num_ranks = self._config.shard.nproc
        self.console.print(
            memory_table("memory (measured)", summary.rank, summary.process, num_ranks)
        )
        low, high = (decimal(f(summary.resident_peaks)) for f in (min, max))
        peak = low if low == high else f"{low} to {high}"
        self.print_line(f"peak resident memory of a rank, with libraries and activations: {peak}")
        speed = f"{summary.tokens:,} tokens at {summary.tokens_per_second:,.0f} tokens/s"
        share, overlap = summary.overlapped_share, ""
        if num_ranks > 1 and share is not None:
            overlap = f"; {share:.0%} of the gather time overlapped with compute"
        self.print_line(speed + overlap)
        for line in changes_of_replicas(record.known() for record in records):
            self.print_line(line)

    def show_files(self) -> None:
        files = ", ".join(sorted(file.name for file in self._run.path.iterdir()))
        self.print_line(f"run directory: {self._run.path} ({files})")

    def print_line(self, line: str) -> None:
        print_line(self.console, line)


def print_line(console: Console, line: str) -> None:
    """Print ``line`` without markup or wrapping, whatever the width of the console."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


class ProgressSink:
    """A progress bar on a terminal; otherwise a line for every ``log_every``-th step."""

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

    def log(self, record: StepMetrics) -> None:
        metrics = "  ".join(_formatted(record))
        self._progress.update(self._task, completed=record.step, metrics=metrics)
        is_logged = record.step in (1, self._steps) or record.step % self._log_every == 0
        if is_logged and not self._console.is_terminal:
            left = self._time_left.render(self._progress.tasks[self._task])
            print_line(self._console, f"step {record.step}/{self._steps}  {metrics}  {left} left")
        if record.validation_loss is not None:
            print_line(
                self._console, f"step {record.step}: validation loss {record.validation_loss:.3f}"
            )

    def close(self) -> None:
        self._progress.stop()


def _formatted(record: StepMetrics) -> Iterator[str]:
    yield f"loss {record.loss:.3f}"
    yield f"{record.tokens_per_second:,.0f} tokens/s"
    if record.grad_norm is not None:
        yield f"grad norm {record.grad_norm:.2f}"
    if record.replicas is not None:
        yield f"replicas {record.replicas}"
        yield f"goodput {record.goodput:.0%}"
    if record.mfu is not None:
        yield f"MFU {record.mfu:.1%}"
    if record.exposed_seconds is not None:
        yield f"exposed {record.exposed_seconds * 1e3:.0f} ms"
        yield f"slowest rank {record.slowest_rank}"
    if record.free_memory_bytes is not None:
        yield f"{decimal(record.free_memory_bytes)} free"


def units_table(plan: Plan) -> Table:
    """A table of the units, with their gathered bytes and the bytes of one rank's shards."""
    table = _table("unit", "parameters", "gathered", "shard of a rank")
    for (num_elements, gathered_bytes, shard_bytes), group in groupby(plan.units, key=_sizes):
        first, *others = [unit.label for unit in group]  # one row for equal units
        times = f"{1 + len(others)} x " if others else ""
        table.add_row(
            f"{first} to {others[-1]}" if others else first,
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


def memory_table(
    title: str, rank: Mapping[str, int], process: Mapping[str, int], num_ranks: int
) -> Table:
    """A table of the bytes of one rank and those of one process, as `memory_of` returns them.

    The total is an upper bound: once all gradients exist, the transient memory is past its peak.
    """
    table = _table(title, f"a rank (of {num_ranks})", "one process")
    for label, name in _USES.items():
        table.add_row(label, decimal(rank[name]), decimal(process[name]))
    table.add_section()
    table.add_row(
        "total", *(decimal(sum(uses[name] for name in _USES.values())) for uses in (rank, process))
    )
    if rank["host"]:
        table.add_row("offloaded to the host", decimal(rank["host"]), decimal(process["host"]))
    return table


_USES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer states": "optimizer",
    "gathered units and gradients, at the peak": "transient",
}


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def draw_losses(path: Path, title: str, records: Sequence[StepMetrics]) -> None:
    """Draw the losses, their mean over a fiftieth of the run, and the validation losses."""
    PackageMissing.check("matplotlib", extra="plot", needed_for=path.name)
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and takes a second)

    axes = (figure := Figure(figsize=(9, 5), dpi=120, layout="constrained")).add_subplot()
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    reach = len(records) // 100  # steps on each side: a mean over past steps only would lag
    means = np.convolve(losses, np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")
    axes.plot(steps[reach : len(steps) - reach], means, color="tab:blue", label="training")
    validation = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    points = list(validation), list(validation.values())
    axes.plot(*points, "o-", color="tab:orange", label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path)
