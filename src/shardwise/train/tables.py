"""The tables that a run shows at its start and at its end."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.train.memory import Footprint
from shardwise.train.switches import Switch

__all__ = ["in_bytes", "memory_table", "switches_table", "units_table"]


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
        "whole units and gradients, at most": "transient",
    }
    for label, name in rows.items():
        table.add_row(label, in_bytes(getattr(rank, name)), in_bytes(getattr(process, name)))
    table.add_section()
    table.add_row("total", in_bytes(rank.total), in_bytes(process.total))
    if rank.host:
        table.add_row("of it on the host", in_bytes(rank.host), in_bytes(process.host))
    return table


def switches_table(switches: Sequence[Switch]) -> Table:
    """What each switch costs (+) and saves (-) one rank in one step."""
    table = _table("a step, foreseen", "device", "host", "links", "host copies", "recomputed")
    for switch in switches:
        change = switch.change
        sizes = (
            change.device_bytes,
            change.host_bytes,
            change.link_bytes,
            change.copied_bytes,
        )
        again = f"{change.recomputed:.0%} of blocks" if change.recomputed else ""
        key = switch.name.rpartition(".")[2]
        table.add_row(f"{key} = {switch.value}", *map(_change, sizes), again)
    return table


def _change(num_bytes: int) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{in_bytes(abs(num_bytes))}" if num_bytes else ""


def in_bytes(number: float) -> str:
    """A number of bytes as people read it: 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:  # noqa: PLR2004 (what the prefixes mean)
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
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
