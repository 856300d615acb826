"""The results of `shardwise bench`: tables, results.json and, with matplotlib, bench.png."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal

from shardwise.bench.engines import BASE, OURS
from shardwise.bench.harness import (
    Column,
    Figures,
    Range,
    Round,
    make_console,
    make_table,
    ratios,
    write_json,
)
from shardwise.bench.machine import describe_machine
from shardwise.bench.options import Setting
from shardwise.bench.work import NUM_TINY_UNITS
from shardwise.errors import ConfigError, PackageMissing
from shardwise.train.run_directory import make_new_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LOSS_TOLERANCE", "Comparison", "Row", "make_directory", "show", "write"]

# In nats, for fp32, because engines sum the same numbers in different orders.
LOSS_TOLERANCE = 1e-4
PRECISION = (
    "bf16: ddp and zero-optimizer run under torch.autocast; the others gather, compute and reduce "
    "in bfloat16 and keep float32 shards"
)
OWN, OTHER, FAINT = "#2a6fbb", "#8a8a8a", "#c9c9c9"
MEGA = 1e6


@dataclass(slots=True)
class Row:
    ratio: Range | None = None  # step time relative to the base in the same round
    cpu_ratio: Range | None = None
    figures: Figures = field(default_factory=dict)

    @property
    def resident_peak(self) -> float | None:
        """The lower of the peaks with malloc's default threshold and with a lower one."""
        peaks = [self.figures.get(name) for name in ("resident_peak", "trimmed_peak")]
        return min((peak for peak in peaks if peak is not None), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of all engines. Figures per rank are maxima over ranks."""

    setting: Setting
    num_parameters: int
    absent: tuple[str, ...]  # peers that are not installed
    rows: dict[str, Row]
    rounds: list[Round] = field(default_factory=list)
    tiny_rounds: list[Round] = field(default_factory=list)


def make_directory(out: Path | None, size: str) -> Path:
    """Make the empty directory ``out``, or a new one under runs/."""
    try:
        if out is None:
            name = f"bench-{Path(size).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            return make_new_directory(Path("runs"), name)
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: the directory is not empty; choose another one")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    return out


def write(directory: Path, compared: Comparison) -> None:
    is_bf16 = compared.setting.is_bf16
    document: dict[str, Any] = {
        "setting": asdict(compared.setting) | {"parameters": compared.num_parameters},
        "absent": compared.absent,
        "loss_tolerance": None if is_bf16 else LOSS_TOLERANCE,
        "tiny_units": NUM_TINY_UNITS,
        "engines": {name: asdict(row) for name, row in compared.rows.items()},
        "rounds": [asdict(round_) for round_ in compared.rounds],
        "tiny_rounds": [asdict(round_) for round_ in compared.tiny_rounds],
    }
    write_json(directory / "results.json", document)


def show(directory: Path, compared: Comparison) -> None:
    """Print the tables and draw bench.png."""
    console, setting, machine = make_console(), compared.setting, describe_machine()
    lines = [
        f"GPT of {compared.num_parameters:,} parameters, {setting.ranks} CPU ranks, "
        f"{setting.dtype}, {setting.batch} x {setting.shape.context} tokens per rank and step, "
        f"fused AdamW; torch {machine['torch']}, {machine['processor']}, {machine['cores']} cores"
        + (f", {machine['malloc']}" if machine["malloc"] else "")
    ]
    _print(console, lines)
    rows = {
        name: row.figures | {"ratio": row.ratio, "cpu_ratio": row.cpu_ratio}
        if row.ratio
        else row.figures
        for name, row in compared.rows.items()
    }
    for title, columns in _tables().items():
        table = make_table(title, columns, rows)
        if table.row_count:
            console.print(table)
    _print(console, _remarks(directory, compared))


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _remarks(directory: Path, compared: Comparison) -> list[str]:
    remarks = [f"{name} is not installed, so it was not compared" for name in compared.absent]
    if compared.setting.is_bf16:
        remarks.append(PRECISION)
    if rounds := compared.rounds:
        remarks.append(
            f"{sum(round_.is_noisy for round_ in rounds)} of {len(rounds)} rounds were noisy and "
            f"are excluded; load up to {max(round_.load for round_ in rounds):.1f}, other "
            f"processes kept up to {max(round_.others for round_ in rounds):.1f} cores busy"
        )
        remarks.append(_noise(compared))
    try:
        _draw(directory / "bench.png", compared)
    except PackageMissing as missing:
        remarks.append(str(missing))
    files = ", ".join(sorted(file.name for file in directory.iterdir()))
    return [*remarks, f"results: {directory} ({files})"]


def _noise(compared: Comparison) -> str:
    """Describe the spread of an engine's ratios, which limits what differences mean."""
    spreads = []
    for name in compared.rows:
        own = ratios(compared.rounds, name, BASE)
        if name != BASE and len(own) > 1:
            low, _, high = statistics.quantiles(own, n=4)
            spreads.append(high - low)
    if not spreads:
        return "too few rounds to estimate the noise; pass --rounds 20"
    return (
        f"noise: an engine's ratios have an interquartile range of {statistics.median(spreads):.2f}"
        "; smaller differences between engines are not significant. To resolve them, pass "
        "--rounds 30 on an idle machine; on a busy machine, compare CPU times"
    )


def _tables() -> dict[str, tuple[Column, ...]]:
    return {
        f"time of a step; ratios to {BASE} in the same round, median (min-max)": (
            ("time", "ratio", str),
            ("CPU time", "cpu_ratio", str),
            ("ms", "seconds", _milliseconds),
            ("CPU ms", "cpu_seconds", _milliseconds),
        ),
        "details of a step": (
            ("page faults", "page_faults", "{:,.0f}".format),
            ("communication, ms", "busy_seconds", _milliseconds),
            ("exposed, ms", "exposed_seconds", _milliseconds),
            (f"loss - {BASE}'s", "loss_gap", "{:.1e}".format),
            ("same loss", "same_loss", lambda is_same: "yes" if is_same else "NO"),
        ),
        "traffic per step and rank": (
            ("copied", "copied_bytes", _bytes),
            ("collectives", "num_collectives", "{:.0f}".format),
            ("sent", "sent_bytes", _bytes),
            ("between replicas", "outer_bytes", _bytes),
        ),
        "peak memory per rank, relative to before the model was made; trimmed: malloc's threshold "
        "at 64 KB": (
            ("live", "live_peak", _bytes),
            ("resident", "resident_peak", _bytes),
            ("resident, trimmed", "trimmed_peak", _bytes),
            ("µs per tiny unit", "unit_microseconds", "{:,.0f}".format),
        ),
    }


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _bytes(number: float) -> str:
    return decimal(int(number))


# -- bench.png -----------------------------------------------------------------------------------


def _draw(path: Path, compared: Comparison) -> None:
    PackageMissing.check("matplotlib", extra="bench", needed_for=path.name)
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional; takes a second to import)

    rows, setting = compared.rows, compared.setting
    panels: list[Callable[[Axes, Comparison, int, str], None]] = []
    panels += [_draw_times] if compared.rounds else []
    panels += [_draw_memory] if any(row.resident_peak for row in rows.values()) else []
    if not panels:
        return
    size = (6 * len(panels) + 1, 1.2 + 0.34 * len(rows))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    title = f"{compared.num_parameters:,} parameters, {setting.ranks} CPU ranks, {setting.dtype}"
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for draw, axis in zip(panels, axes, strict=True):
        for place, name in enumerate(rows):
            draw(axis, compared, place, name)
        axis.grid(axis="x", alpha=0.2)
    axes[0].set_yticks(range(len(rows)), list(rows))
    axes[0].invert_yaxis()
    figure.savefig(path)


def _draw_times(axis: "Axes", compared: Comparison, place: int, name: str) -> None:
    own = ratios(compared.rounds, name, BASE)
    axis.plot(own, [place] * len(own), "|", color=FAINT, markersize=9)
    axis.plot([statistics.median(own)], [place], "o", color=_color(name))
    axis.axvline(1.0, color=OTHER, linewidth=0.8, linestyle="--")
    axis.set_xlabel(f"step time relative to {BASE} (dot: median; lines: rounds)")


def _draw_memory(axis: "Axes", compared: Comparison, place: int, name: str) -> None:
    row = compared.rows[name]
    resident, live = row.resident_peak or 0.0, row.figures.get("live_peak", 0.0)
    axis.barh(place, resident / MEGA, color=_color(name), height=0.6, alpha=0.45)
    axis.barh(place, live / MEGA, color=_color(name), height=0.3)
    axis.set_xlabel("peak MB per rank (wide: resident; narrow: live)")


def _color(name: str) -> str:
    return OWN if name.startswith(OURS) else OTHER
