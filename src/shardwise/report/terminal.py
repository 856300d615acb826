"""Terminal tables of a run's findings, units and ranks."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.page.formatting import NOTHING, bytes_text, percent, seconds_text
from shardwise.plan.spelling import counted
from shardwise.report.findings import Finding, savings
from shardwise.report.summary import RankSummary, Summary, UnitSummary

__all__ = ["show"]

MAX_ROWS = 20  # rows per table; the page has all


def show(console: Console, summary: Summary, findings: Sequence[Finding]) -> None:
    console.print(Text(overview(summary)))
    if findings:
        console.print(_findings_table(findings, summary.seconds))
    console.print(_units_table(summary.units))
    console.print(_ranks_table(summary))


def overview(summary: Summary) -> str:
    """Summarize step time, exposed communication, peak memory and straggler in one line."""
    ranks = counted(len(summary.ranks), "rank")
    steps = counted(len(summary.steps), "recorded step")
    exposed = f"{seconds_text(summary.exposed_seconds)} of it exposed communication"
    parts = [
        f"{ranks}, {steps}",
        f"{seconds_text(summary.seconds)} per step",
        f"{exposed} ({summary.exposed_share:.0%})",
    ]
    if summary.peak is not None:
        rank, peak = summary.peak
        parts.append(f"peak {bytes_text(peak.total)} on rank {rank}")
    if summary.straggler is not None:
        parts.append(f"rank {summary.straggler} is the straggler")
    return "; ".join(parts)


def _findings_table(findings: Sequence[Finding], step_seconds: float) -> Table:
    table = Table(title="Findings, by cost", title_justify="left", show_lines=True)
    table.add_column("", justify="right")
    table.add_column("finding", ratio=1)
    table.add_column("per step", justify="right", no_wrap=True)
    for number, finding in enumerate(findings, start=1):
        description = Text(finding.title, style="bold")
        if finding.detail:
            description.append(f"\n{finding.detail}", style="not bold")
        table.add_row(str(number), description, "\n".join(savings(finding, step_seconds)))
    return table


def _units_table(units: Sequence[UnitSummary]) -> Table:
    table = Table(title="Units, by exposed communication", title_justify="left")
    table.add_column("unit", overflow="fold", ratio=1)
    for heading in ("bytes", "gather", "exposed", "forward", "backward", "reduce", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_cost = sorted(units, key=lambda unit: -unit.exposed_seconds)
    for unit in by_cost[:MAX_ROWS]:
        times = map(seconds_text, unit.seconds.values())
        table.add_row(Text(unit.figures.label), bytes_text(unit.figures.gathered_bytes), *times)
    _caption_hidden_rows(table, len(units))
    return table


def _ranks_table(summary: Summary) -> Table:
    table = Table(title="Ranks, by their own work", title_justify="left")
    table.add_column("rank", no_wrap=True)
    for heading in ("step", "compute", "exposed", "around", "padding", "padded tokens", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_work = sorted(summary.ranks, key=lambda rank: -rank.busy_seconds)
    for rank in by_work[:MAX_ROWS]:
        is_straggler = rank.rank == summary.straggler
        name = f"{rank.rank} (straggler)" if is_straggler else str(rank.rank)
        table.add_row(name, *_rank_cells(rank), style="bold" if is_straggler else "")
    _caption_hidden_rows(table, len(summary.ranks))
    return table


def _rank_cells(rank: RankSummary) -> tuple[str, ...]:
    times = (rank.seconds, rank.compute_seconds, rank.exposed_seconds, rank.around_seconds)
    return (
        *map(seconds_text, times),
        bytes_text(rank.padding_bytes),
        NOTHING if rank.padded_tokens is None else percent(rank.padded_tokens),
        NOTHING if rank.peak is None else bytes_text(rank.peak.total),
    )


def _caption_hidden_rows(table: Table, num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        table.caption = f"{num_rows - MAX_ROWS} more on the page"
