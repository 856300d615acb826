"""A comparison as a picture: step time of every round, and memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.bench.engines import OURS
from shardwise.bench.figures import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_results"]

OWN, OTHER, FAINT = "#2a6fbb", "#8a8a8a", "#c9c9c9"
MEGA = 1e6


def draw_results(path: Path, results: Results) -> None:
    """Draw one line for each engine; what was not measured has no panel.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second, and an optional dependency)

    rows = list(results.rows.values())
    panels = [
        draw
        for draw, has_any in (
            (_draw_times, any(row.times for row in rows)),
            (_draw_memory, any(row.resident_peak for row in rows)),
        )
        if has_any
    ]
    if not panels:
        return
    size = (6 * len(panels) + 1, 1.2 + 0.34 * len(rows))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    setting = results.setting
    size_of_model = f"{results.num_parameters:,} parameters"
    figure.suptitle(f"{size_of_model}, {setting.ranks} CPU ranks, {setting.dtype}")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for draw, axis in zip(panels, axes, strict=True):
        draw(axis, results, rows)
        axis.grid(axis="x", alpha=0.2)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].invert_yaxis()
    figure.savefig(path)


def _draw_times(axis: "Axes", results: Results, rows: Sequence[Row]) -> None:
    base = results.setting.engines[0]
    quiet = [round_.turns for round_ in results.rounds if not round_.is_noisy]
    for place, row in enumerate(rows):
        if row.times is None:
            continue
        ratios = [t[row.name].seconds / t[base].seconds for t in quiet if row.name in t]
        axis.plot(ratios, [place] * len(ratios), "|", color=FAINT, markersize=9)
        axis.plot([row.times.ratio.median], [place], "o", color=_color(row))
    axis.axvline(1.0, color=OTHER, linewidth=0.8, linestyle="--")
    axis.set_xlabel(f"step time relative to {base} (dot: median; lines: rounds)")


def _draw_memory(axis: "Axes", results: Results, rows: Sequence[Row]) -> None:  # noqa: ARG001
    for place, row in enumerate(rows):
        if row.resident_peak is not None:
            axis.barh(place, row.resident_peak / MEGA, color=_color(row), height=0.6, alpha=0.45)
        if row.inspected is not None:
            axis.barh(place, row.inspected.live_peak / MEGA, color=_color(row), height=0.3)
    axis.set_xlabel("MB of a rank at the peak (wide: resident; narrow: live)")


def _color(row: Row) -> str:
    return OWN if row.name.startswith(OURS) else OTHER
