"""The tables that a run shows at its start and at its end."""

from itertools import groupby

from rich.table import Table

from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.train.memory import Footprint

__all__ = ["in_bytes", "memory_table", "units_table"]


def units_table(plan: Plan) -> Table:
    """What is gathered together, and the bytes that a rank keeps of it."""
    table = _table("unit", "parameters", "gathered", "kept by a rank")
    for _, alike in groupby(plan.units, key=_sizes):
        units = list(alike)
        table.add_row(
            _name(units),
            _times(f"{sum(spec.num_elements for spec in units[0].parameters):,}", units),
            _times(in_bytes(units[0].gathered_bytes), units),
            _times(in_bytes(units[0].shard_bytes), units),
        )
    table.add_section()
    whole, kept = in_bytes(plan.parameter_bytes), in_bytes(plan.shard_bytes)
    table.add_row("model", f"{plan.num_parameters:,}", whole, kept)
    return table


def memory_table(title: str, rank: Footprint, process: Footprint, num_ranks: int) -> Table:
    """The bytes of a rank against those of one process that trains alone."""
    table = _table(title, f"a rank (of {num_ranks})", "one process")
    rows = {
        "parameters": "parameters",
        "gradients": "gradients",
        "AdamW's two states": "optimizer",
        "units gathered, at most": "gathered",
        "gradients being reduced, at most": "reducing",
    }
    for label, name in rows.items():
        table.add_row(label, in_bytes(getattr(rank, name)), in_bytes(getattr(process, name)))
    table.add_section()
    table.add_row("total", in_bytes(rank.total), in_bytes(process.total))
    return table


def in_bytes(number: float) -> str:
    """A number of bytes as people read it: 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:  # noqa: PLR2004 (what the prefixes mean)
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _sizes(unit: UnitPlan) -> tuple[int, int, int]:
    """What alike units share, so that a deep model still fits on a screen."""
    num_elements = sum(spec.num_elements for spec in unit.parameters)
    return num_elements, unit.gathered_bytes, unit.shard_bytes


def _name(units: list[UnitPlan]) -> str:
    first, last = units[0].label, units[-1].label
    return first if len(units) == 1 else f"{first} to {last}"


def _times(size: str, units: list[UnitPlan]) -> str:
    return size if len(units) == 1 else f"{len(units)} x {size}"
