"""The tables of a comparison. A dash is what an engine does not tell, or what was not measured."""

from rich.filesize import decimal
from rich.table import Table

from shardwise.bench.figures import LOSS_TOLERANCE, Range, Results, Row, Times

__all__ = ["memory_table", "time_table", "traffic_table"]

DASH = "-"


def time_table(results: Results) -> Table:
    """Ratios to the base: medians over rounds, with the least and the most."""
    base = results.setting.engines[0]
    table = _table(
        f"a step; ratios to {base} in the same round, median (least-most)",
        "time",
        "CPU time",
        "ms",
        "CPU ms",
        "page faults",
        "hidden",
        "exposed",
        f"loss - {base}'s",
    )
    for row in results.rows.values():
        if row.times is not None:
            table.add_row(row.name, *_times(row.times, is_bf16=results.setting.is_bf16))
    return table


def traffic_table(results: Results) -> Table:
    """What a step moves."""
    table = _table("a step of a rank", "copied", "collectives", "sent")
    for row in results.rows.values():
        if row.inspected is not None:
            moved = row.inspected
            copied, sent = decimal(moved.copied_bytes), decimal(moved.sent_bytes)
            table.add_row(row.name, copied, str(moved.num_collectives), sent)
    return table


def memory_table(results: Results) -> Table:
    """Peaks, and what a unit costs on the host."""
    table = _table(
        "above the memory before the model was made",
        "live, peak",
        "resident, peak",
        "with malloc's threshold at 64 KB",
        "µs a tiny unit",
    )
    for row in results.rows.values():
        table.add_row(row.name, *_memory(row))
    return table


def _times(times: Times, *, is_bf16: bool) -> tuple[str, ...]:
    busy, exposed = times.busy_seconds, times.exposed_seconds
    told = busy is not None and exposed is not None
    tolerance = "" if is_bf16 else " ok" if times.loss_gap <= LOSS_TOLERANCE else " FAR"
    return (
        _range(times.ratio),
        _range(times.cpu_ratio),
        f"{1e3 * times.seconds:.1f}",
        f"{1e3 * times.cpu_seconds:.1f}",
        f"{times.page_faults:,.0f}",
        f"{1e3 * max(0.0, (busy or 0.0) - (exposed or 0.0)):.1f} ms" if told else DASH,
        f"{1e3 * (exposed or 0.0):.1f} ms" if told else DASH,
        f"{times.loss_gap:.1e}{tolerance}",
    )


def _memory(row: Row) -> tuple[str, ...]:
    inspected = row.inspected
    return (
        _bytes(inspected.live_peak if inspected else None),
        _bytes(inspected.resident_peak if inspected else None),
        _bytes(row.trimmed_peak),
        DASH if row.unit_microseconds is None else f"{row.unit_microseconds:,.0f}",
    )


def _range(values: Range) -> str:
    return f"{values.median:.2f} ({values.least:.2f}-{values.most:.2f})"


def _bytes(value: int | None) -> str:
    return DASH if value is None else decimal(value)


def _table(first: str, *others: str) -> Table:
    table = Table(title=first)
    table.add_column("engine", no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
