"""The results of a comparison: tables, results.json and, with matplotlib, bench.png."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shardwise.bench.engines import OURS
from shardwise.bench.figures import LOSS_TOLERANCE, Range, Results, Row
from shardwise.bench.machine import Machine
from shardwise.bench.work import NUM_TINY_UNITS
from shardwise.errors import ConfigError
from shardwise.train.run_directory import make_new_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["make_directory", "show", "write"]

NO_PICTURE = 'bench.png was not drawn, matplotlib is missing: pip install "shardwise[plot]"'
PRECISION = (
    "bf16: ddp and zero-optimizer run under torch.autocast; the others gather, compute and reduce "
    "in bfloat16 and keep float32 shards"
)
DASH = "-"  # not measured, or not recorded by the engine
OWN, OTHER, FAINT = "#2a6fbb", "#8a8a8a", "#c9c9c9"
MEGA = 1e6


def make_directory(out: Path | None, size: str) -> Path:
    """Make the directory ``out``, or a new one under runs/.

    Raises:
        ConfigError: it cannot be made, or is not empty.
    """
    try:
        if out is None:
            name = f"bench-{Path(size).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            return make_new_directory(Path("runs"), name)
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: already holds files; choose another")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    return out


def write(directory: Path, results: Results, machine: Machine) -> None:
    """Write results.json."""
    base = results.setting.engines[0]
    document: dict[str, Any] = {
        "machine": asdict(machine),
        "setting": asdict(results.setting) | {"parameters": results.num_parameters},
        "absent": results.absent,
        "loss_tolerance": None if results.setting.is_bf16 else LOSS_TOLERANCE,
        "tiny_units": NUM_TINY_UNITS,
        "engines": {
            name: asdict(row) | {"resident_peak": row.resident_peak}
            for name, row in results.rows.items()
        },
        "rounds": [asdict(round_) for round_ in results.rounds],
        "tiny_rounds": [asdict(round_) for round_ in results.tiny_rounds],
    }
    for round_ in (*document["rounds"], *document["tiny_rounds"]):
        of_base = round_["turns"][base]
        for turn in round_["turns"].values():
            turn["ratio"] = turn["seconds"] / of_base["seconds"]
            turn["cpu_ratio"] = turn["cpu_seconds"] / of_base["cpu_seconds"]
    text = json.dumps(document, indent=1) + "\n"
    (directory / "results.json").write_text(text, encoding="utf-8")


def show(directory: Path, results: Results, machine: Machine, console: Console) -> None:
    """Print the tables and draw bench.png."""
    setting = results.setting
    lines = [
        f"GPT of {results.num_parameters:,} parameters, {setting.ranks} CPU ranks, "
        f"{setting.dtype}, {setting.batch} x {setting.shape.context} tokens per rank and step, "
        f"fused AdamW; torch {machine.torch}, {machine.processor}, {machine.cores} cores"
        + (f", {machine.malloc}" if machine.malloc else "")
    ]
    _print(console, lines)
    for table in _tables(results):
        if table.row_count:
            console.print(table)
    _print(console, _remarks(directory, results))


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _remarks(directory: Path, results: Results) -> list[str]:
    remarks = [f"{name} is not installed, so it was not compared" for name in results.absent]
    if results.setting.is_bf16:
        remarks.append(PRECISION)
    if results.rounds:
        load = max(round_.load for round_ in results.rounds)
        others = max(round_.others for round_ in results.rounds)
        remarks.append(
            f"{results.num_noisy} of {len(results.rounds)} rounds were noisy and are left out; "
            f"load up to {load:.1f}, other processes kept up to {others:.1f} cores busy"
        )
    try:
        _draw(directory / "bench.png", results)
    except ModuleNotFoundError:
        remarks.append(NO_PICTURE)
    files = ", ".join(sorted(file.name for file in directory.iterdir()))
    return [*remarks, f"results: {directory} ({files})"]


# -- tables --------------------------------------------------------------------------------------


def _tables(results: Results) -> list[Table]:
    base, is_bf16 = results.setting.engines[0], results.setting.is_bf16
    rows = list(results.rows.values())
    times = _table(
        f"time of a step; ratios to {base} in the same round, median (least-most)",
        (
            "time",
            "CPU time",
            "ms",
            "CPU ms",
            "page faults",
            "hidden",
            "exposed",
            f"loss - {base}'s",
        ),
    )
    traffic = _table("traffic of a step per rank", ("copied", "collectives", "sent"))
    memory = _table(
        "memory per rank above that before the model was made",
        ("live, peak", "resident, peak", "with malloc's threshold at 64 KB", "µs per tiny unit"),
    )
    for row in rows:
        if row.times is not None:
            times.add_row(row.name, *_time_cells(row, is_bf16=is_bf16))
        if (moved := row.inspected) is not None:
            copied, sent = decimal(moved.copied_bytes), decimal(moved.sent_bytes)
            traffic.add_row(row.name, copied, str(moved.num_collectives), sent)
    if any(row.resident_peak or row.unit_microseconds for row in rows):
        for row in rows:
            memory.add_row(row.name, *_memory_cells(row))
    return [times, traffic, memory]


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("engine", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _time_cells(row: Row, *, is_bf16: bool) -> tuple[str, ...]:
    times = row.times
    assert times is not None
    hidden, exposed = DASH, DASH
    if times.busy_seconds is not None and times.exposed_seconds is not None:
        hidden = f"{1e3 * max(0.0, times.busy_seconds - times.exposed_seconds):.1f} ms"
        exposed = f"{1e3 * times.exposed_seconds:.1f} ms"
    verdict = "" if is_bf16 else " ok" if times.loss_gap <= LOSS_TOLERANCE else " FAR"
    return (
        _range(times.ratio),
        _range(times.cpu_ratio),
        f"{1e3 * times.seconds:.1f}",
        f"{1e3 * times.cpu_seconds:.1f}",
        f"{times.page_faults:,.0f}",
        hidden,
        exposed,
        f"{times.loss_gap:.1e}{verdict}",
    )


def _memory_cells(row: Row) -> tuple[str, ...]:
    inspected = row.inspected
    peaks = (
        inspected.live_peak if inspected else None,
        inspected.resident_peak if inspected else None,
        row.trimmed_peak,
    )
    cost = DASH if row.unit_microseconds is None else f"{row.unit_microseconds:,.0f}"
    return (*(DASH if peak is None else decimal(peak) for peak in peaks), cost)


def _range(values: Range) -> str:
    return f"{values.median:.2f} ({values.least:.2f}-{values.most:.2f})"


# -- bench.png -----------------------------------------------------------------------------------


def _draw(path: Path, results: Results) -> None:
    """Draw one line per engine; what was not measured has no panel.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second, and an optional dependency)

    rows = list(results.rows.values())
    panels: list[Callable[[Axes, Results], None]] = []
    if any(row.times for row in rows):
        panels.append(_draw_times)
    if any(row.resident_peak for row in rows):
        panels.append(_draw_memory)
    if not panels:
        return
    size = (6 * len(panels) + 1, 1.2 + 0.34 * len(rows))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    setting = results.setting
    title = f"{results.num_parameters:,} parameters, {setting.ranks} CPU ranks, {setting.dtype}"
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for draw, axis in zip(panels, axes, strict=True):
        draw(axis, results)
        axis.grid(axis="x", alpha=0.2)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].invert_yaxis()
    figure.savefig(path)


def _draw_times(axis: "Axes", results: Results) -> None:
    base = results.setting.engines[0]
    quiet = [round_.turns for round_ in results.rounds if not round_.is_noisy]
    for place, row in enumerate(results.rows.values()):
        if row.times is None:
            continue
        ratios = [t[row.name].seconds / t[base].seconds for t in quiet if row.name in t]
        axis.plot(ratios, [place] * len(ratios), "|", color=FAINT, markersize=9)
        axis.plot([row.times.ratio.median], [place], "o", color=_color(row))
    axis.axvline(1.0, color=OTHER, linewidth=0.8, linestyle="--")
    axis.set_xlabel(f"step time relative to {base} (dot: median; lines: rounds)")


def _draw_memory(axis: "Axes", results: Results) -> None:
    for place, row in enumerate(results.rows.values()):
        if row.resident_peak is not None:
            axis.barh(place, row.resident_peak / MEGA, color=_color(row), height=0.6, alpha=0.45)
        if row.inspected is not None:
            axis.barh(place, row.inspected.live_peak / MEGA, color=_color(row), height=0.3)
    axis.set_xlabel("peak MB per rank (wide: resident; narrow: live)")


def _color(row: Row) -> str:
    return OWN if row.name.startswith(OURS) else OTHER
