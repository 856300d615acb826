"""The text and tables of the page as HTML. All names chosen by users are escaped."""

from collections.abc import Sequence
from html import escape
from statistics import median_low

from shardwise.page.formatting import (
    NOTHING,
    bytes_text,
    cell,
    figure_tiles,
    percent,
    seconds_text,
    table,
)
from shardwise.plan.spelling import counted
from shardwise.recording.format import Header
from shardwise.report.findings import Finding, savings
from shardwise.report.summary import EXPOSED, RankSummary, Summary, UnitSummary

__all__ = ["findings_section", "ranks_table", "tiles", "units_table"]


def tiles(summary: Summary, header: Header) -> str:
    share = f"{summary.exposed_share:.0%} of a step"
    found = [
        (
            "Step",
            seconds_text(summary.seconds),
            f"mean of {counted(len(summary.steps), 'recorded step')}",
        ),
        ("Exposed communication", seconds_text(summary.exposed_seconds), share),
    ]
    if summary.peak is not None:
        rank, peak = summary.peak
        where = f"rank {rank}, at {header.units[peak.unit].label}"
        found.append(("Peak memory", bytes_text(peak.total), where))
    if summary.straggler is None:
        found.append(("Straggler", "none", "ranks do equal work"))
    else:
        late = lateness(summary, summary.straggler)
        found.append(
            ("Straggler", f"rank {summary.straggler}", f"{late} more work than the median")
        )
    return figure_tiles(found)


def lateness(summary: Summary, rank: int) -> str:
    busy = {row.rank: row.busy_seconds for row in summary.ranks}
    return seconds_text(busy[rank] - median_low(busy.values()))


def findings_section(findings: Sequence[Finding], summary: Summary) -> str:
    """Render the findings with their savings and buttons that show the unit or rank; "" if none."""
    if not findings:
        return ""
    items = "".join(_finding(finding, summary) for finding in findings)
    return (
        '<section id="findings" aria-labelledby="findings-title">'
        f'<h2 id="findings-title">Findings</h2><ol>{items}</ol></section>'
    )


def _finding(finding: Finding, summary: Summary) -> str:
    saves = "".join(f"<b>{escape(line)}</b>" for line in savings(finding, summary.seconds))
    buttons = ""
    if finding.unit is not None:
        label = escape(summary.units[finding.unit].figures.label)
        buttons += f'<button data-unit="{finding.unit}">Show {label}</button>'
    if finding.rank is not None:
        buttons += f'<button data-rank="{finding.rank}">Show rank {finding.rank}</button>'
    detail = f"<p>{escape(finding.detail)}</p>" if finding.detail else ""
    return (
        f"<li><div><h3>{escape(finding.title)}</h3>{detail}{buttons}</div>"
        f'<p class="saves">{saves}</p></li>'
    )


_UNIT_COLUMNS = (
    "Unit", "Elements", "Gathered", "Shard", "Gather", "Gather exposed", "Forward", "Backward",
    "Reduce", "Reduce exposed",
)  # fmt: skip
_RANK_COLUMNS = (
    "Rank", "Step", "Compute", "Exposed", "Around steps", "Where the time went", "Communicated",
    "Shards", "Padding", "Padded tokens", "Peak memory", "Peak at",
)  # fmt: skip


def units_table(summary: Summary) -> str:
    caption = "Per unit: bytes, and seconds of a step (means over ranks and steps)"
    rows = (_unit_row(unit) for unit in summary.units)
    return table("units", caption, _UNIT_COLUMNS, rows)


def _unit_row(unit: UnitSummary) -> str:
    figures, name = unit.figures, escape(unit.figures.label)
    button = f'<button data-unit="{unit.index}" aria-pressed="false">{name}</button>'
    times = (
        cell(seconds, seconds_text(seconds), "exposed" if kind in EXPOSED else "")
        for kind, seconds in unit.seconds.items()
    )
    return (
        f'<tr data-name="{name}"><th scope="row" data-value="{unit.index}">{button}</th>'
        + cell(figures.num_elements, f"{figures.num_elements:,}")
        + cell(figures.gathered_bytes, bytes_text(figures.gathered_bytes))
        + cell(figures.shard_bytes, bytes_text(figures.shard_bytes))
        + "".join(times)
        + "</tr>"
    )


def ranks_table(summary: Summary) -> str:
    """Render the table of ranks, with the straggler marked."""
    caption = "Per rank: seconds of a step (means over steps), bytes and padding"
    longest = max(rank.busy_seconds + rank.exposed_seconds for rank in summary.ranks)
    rows = (_rank_row(rank, summary, longest or 1.0) for rank in summary.ranks)
    return table("ranks", caption, _RANK_COLUMNS, rows)


def _rank_row(rank: RankSummary, summary: Summary, longest: float) -> str:
    is_straggler = rank.rank == summary.straggler
    badge = " <mark>straggler</mark>" if is_straggler else ""
    button = f'<button data-rank="{rank.rank}">rank {rank.rank}</button>'
    times = (rank.seconds, rank.compute_seconds, rank.exposed_seconds, rank.around_seconds)
    peak = rank.peak
    where = escape(summary.units[peak.unit].figures.label) if peak else NOTHING
    return (
        f'<tr><th scope="row" data-value="{rank.rank}">{button}{badge}</th>'
        + "".join(cell(seconds, seconds_text(seconds)) for seconds in times)
        + cell(rank.busy_seconds, _shares(rank, longest), "wide")
        + cell(rank.communication_bytes, bytes_text(rank.communication_bytes))
        + cell(rank.own_bytes, bytes_text(rank.own_bytes))
        + cell(rank.padding_bytes, bytes_text(rank.padding_bytes))
        + cell(rank.padded_tokens or 0, percent(rank.padded_tokens or 0))
        + cell(peak.total if peak else 0, bytes_text(peak.total if peak else 0))
        + cell(peak.unit if peak else -1, where)
        + "</tr>"
    )


def _shares(rank: RankSummary, longest: float) -> str:
    parts = (
        ("forward", rank.compute_seconds),
        ("exposed", rank.exposed_seconds),
        ("around", rank.around_seconds),
    )
    bars = (f'<i class="{css}" style="width:{s / longest:.2%}"></i>' for css, s in parts)
    return f'<span class="shares" aria-hidden="true">{"".join(bars)}</span>'
