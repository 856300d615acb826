"""Terminal output of `shardwise plan`: the winner, other candidates, scaling and the call.

Lines are up to 100 characters wide.
"""

from collections.abc import Sequence
from operator import attrgetter

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.forecast.forecast import Forecast
from shardwise.forecast.memory.step import CATEGORIES, Certificate, Moment
from shardwise.forecast.search.scaling import Curve
from shardwise.forecast.time.saving import CheckpointPlan, Storage
from shardwise.forecast.view.planning import Planned
from shardwise.forecast.view.text import (
    DEFINITIONS,
    describe,
    reasons,
    scaling_text,
    settings_texts,
    with_device_word,
)
from shardwise.page.formatting import NOTHING, bytes_text, percent, seconds_text
from shardwise.plan.spelling import counted

__all__ = ["explain", "show", "show_checkpoint"]

MAX_ROWS = 12  # candidates shown; the page has all


def show(console: Console, planned: Planned) -> None:
    """Print the result of the search."""
    console.print(Text(f"{planned.title}: {'; '.join(planned.facts)}\n"))
    console.print(_candidates_table(planned))
    rank = "Best" if planned.winner.fits else "Smallest, but too large"
    console.print(Text(f"\n{rank}: {describe(planned.winner.configuration)}", style="bold"))
    for line in figures(planned):
        console.print(Text(line))
    for line in reasons(planned.ranking):
        console.print(_item(line))
    if planned.curves:
        console.print(_scaling_table(planned.curves))
        for line in scaling_text(planned.curves):
            console.print(_item(line))
    console.print(Text(f"\n{planned.call}\n"), soft_wrap=True)


def figures(planned: Planned) -> list[str]:
    """Return the winner's time and memory, one line each."""
    winner = planned.winner
    step, memory = winner.step, winner.memory
    time = (
        f"{seconds_text(step.seconds)} per step, {step.tokens_per_second:,.0f} tokens/s per GPU, "
        f"{winner.tokens_per_second:,.0f} in total; MFU {step.mfu:.1%}, HFU {step.hfu:.1%}; "
        f"exposed communication {seconds_text(step.exposed_seconds)}"
    )
    available = bytes_text(winner.cluster.accelerator.memory_bytes)
    host = ""
    if memory.host_bytes:
        on_node = min(winner.cluster.devices_per_node, winner.cluster.num_devices)
        host = (
            f"; {bytes_text(memory.host_bytes)} of host memory per GPU, "
            f"{bytes_text(memory.host_bytes * on_node)} per node"
        )
    low, high = map(bytes_text, memory.range_bytes)
    used = (
        f"{bytes_text(memory.device_bytes)} ({low} to {high}) of a GPU's {available} "
        f"({winner.verdict}): "
        f"{bytes_text(memory.peak_bytes)} in tensors (at {memory.peak.label}), "
        f"{bytes_text(memory.reserve_bytes)} reserved, {bytes_text(memory.overhead_bytes)} for the "
        f"driver and its libraries{host}"
    )
    budget = planned.budget.summary(winner)
    return [
        with_device_word(winner.cluster, time),
        with_device_word(winner.cluster, used),
        *([budget] if budget else []),
    ]


def _candidates_table(planned: Planned) -> Table:
    shown = planned.ranking.fitting
    title = "Configurations, best first, per GPU (*: on the frontier of memory and time)"
    if not shown:
        shown = planned.ranking.too_large
        title = "Configurations, which do not fit, smallest first, per GPU"
    table = _table(with_device_word(planned.winner.cluster, title))
    for heading in ("", "sharding", "micro", "checkpoint", "on host"):
        table.add_column(heading, overflow="fold")
    for heading in ("ahead", "tokens/s", "MFU", "exposed", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, forecast in enumerate(shown[:MAX_ROWS], start=1):
        mark = "*" if forecast in planned.frontier else ""
        table.add_row(f"{number}{mark}", *settings_texts(forecast.configuration), *_times(forecast))
    rest = len(shown) - MAX_ROWS
    if rest > 0:
        table.caption = f"{rest} more on the page (--html FILE)"
    return table


def _times(forecast: Forecast) -> tuple[str, ...]:
    memory = bytes_text(forecast.memory.device_bytes)
    if forecast.time is None:
        return NOTHING, NOTHING, NOTHING, memory
    step = forecast.time
    exposed = percent(step.exposed_seconds / step.seconds)
    return f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}", exposed, memory


def _scaling_table(curves: Sequence[Curve]) -> Table:
    table = _table("\nScaling: tokens/s per GPU, with constant work per GPU")
    table.add_column("GPUs", justify="right")
    for curve in curves:
        table.add_column(curve.label, justify="right")
        table.add_column("MFU", justify="right")
    sizes = sorted({point.cluster.num_devices for curve in curves for point in curve.points})
    for size in sizes:
        cells: list[str] = []
        for curve in curves:
            found = [point.step for point in curve.points if point.cluster.num_devices == size]
            cells += (
                [f"{found[0].tokens_per_second:,.0f}", f"{found[0].mfu:.1%}"] if found else ["", ""]
            )
        table.add_row(f"{size:,}", *cells)
    return table


def explain(console: Console, planned: Planned) -> None:
    """Print where the winner's time and memory go."""
    step, memory = planned.winner.step, planned.winner.memory
    table = _table("Time of a step by cause")
    table.add_column("cause")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in sorted(step.breakdown.items(), key=lambda item: -item[1]):
        table.add_row(name, seconds_text(seconds), percent(seconds / step.seconds))
    console.print(table)
    console.print(_memory_table(memory))
    for name, definition in DEFINITIONS.items():
        console.print(Text(f"{name}: {with_device_word(planned.winner.cluster, definition)}"))


def show_checkpoint(
    console: Console, saved: CheckpointPlan, storage: Storage, *, num_parts: int = 1
) -> None:
    """Print what ranks write and read of a checkpoint.

    Args:
        console: output console.
        saved: the checkpoint of the data-parallel ranks that share one part of the model.
        storage: where the checkpoint is written.
        num_parts: parts of the model, over tensor-parallel ranks and pipeline stages.
    """
    part = "" if num_parts == 1 else f" of the last of {num_parts} parts of the model"
    title = (
        f"A checkpoint{part}: {bytes_text(saved.num_bytes)} in "
        f"{counted(len(saved.files), 'file')}; a rank receives "
        f"{bytes_text(saved.exchanged_bytes)} of checksums and no tensors"
    )
    table = _table(title)
    for heading in ("", "per rank: min", "max", "ranges", "files", "ranks per file", "time"):
        table.add_column(heading, justify="right")
    for name, traffic in (("save", saved.save), ("load", saved.load)):
        seconds = traffic.seconds(storage)
        table.add_row(
            name,
            bytes_text(int(traffic.num_bytes.min())),
            bytes_text(int(traffic.num_bytes.max())),
            f"{int(traffic.num_ranges.max()):,}",
            f"{int(traffic.num_files.max()):,}",
            f"{traffic.ranks_per_file:,}",
            seconds_text(seconds),
        )
    console.print(table)


def _memory_table(memory: Certificate) -> Table:
    table = _table("Memory over the last micro-batch and the update")
    table.add_column("category")
    moments = _moments(memory)
    for moment in moments:
        peak = " (peak)" if moment is memory.peak else ""
        table.add_column(f"{moment.label}{peak}", justify="right", overflow="fold")
    for category in CATEGORIES:
        table.add_row(category, *(bytes_text(getattr(moment, category)) for moment in moments))
    table.add_row("total", *(bytes_text(moment.total) for moment in moments), style="bold")
    return table


def _moments(memory: Certificate) -> list[Moment]:
    """Return the first and last moments, the peak, and the highest moment before backward."""
    timeline = memory.timeline
    backward = next(n for n, moment in enumerate(timeline) if moment.label.startswith("backward"))
    highest = max(timeline[:backward], key=attrgetter("total"))
    found = [timeline[0], highest, memory.peak, timeline[-1]]
    return sorted(dict.fromkeys(found), key=timeline.index)


def _item(line: str) -> Table:
    """Format a list item whose continuation lines are indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", Text(line))
    return grid


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
