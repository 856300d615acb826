"""A measured update with different units: small units merged, or a large unit split."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from shardwise.forecast.time.replay import Part
from shardwise.recording.format import UnitFigures
from shardwise.report.measured import Measured
from shardwise.schedule.events import EventKind

__all__ = ["merge_units", "split_unit"]

_COLLECTIVES = (EventKind.GATHER, EventKind.REDUCE)


def merge_units(measured: Measured, group: Sequence[int]) -> Measured:
    """Merge the consecutive units ``group`` into the first of them."""
    first, *others = group
    target = dict.fromkeys(group, first)
    units = list(measured.units)
    units[first] = _sum_of([units[unit] for unit in group])
    for unit in others:
        units[unit] = _scaled(units[unit], 0.0)

    def change(_rank: int, parts: Sequence[Part]) -> Iterator[Part]:
        renamed = (replace(part, unit=target.get(part.unit, part.unit)) for part in parts)
        for _, adjacent in groupby(renamed, key=lambda part: (part.kind, part.unit)):
            merged_parts = list(adjacent)
            yield replace(merged_parts[0], seconds=sum(part.seconds for part in merged_parts))

    changed = measured.with_passes(change, units=tuple(units))
    transfers = dict(measured.transfers)
    launches = dict(measured.launches)
    for kind in _COLLECTIVES:
        size = sum(measured.bytes_of((kind, unit)) for unit in group)
        transfers[kind, first] = measured.fit(kind).at(size)
    for kind in EventKind:
        seconds = [launches.pop((kind, unit)) for unit in group if (kind, unit) in launches]
        if seconds:
            launches[kind, first] = max(seconds)
    return replace(changed, transfers=transfers, launches=launches)


def split_unit(measured: Measured, unit: int, shares: Sequence[float]) -> Measured:
    """Split ``unit`` into child units that take ``shares`` of it; it keeps the rest."""
    rest = max(0.0, 1.0 - sum(shares))
    figures, count = measured.units[unit], len(measured.units)
    units = list(measured.units)
    units[unit] = replace(_scaled(figures, rest), has_child_units=True)
    units += [
        replace(
            _scaled(figures, share), label=f"{figures.label}[{number}]", parent=unit, reshard=True
        )
        for number, share in enumerate(shares)
    ]
    children = list(zip(range(count, len(units)), shares, strict=True))

    def change(_rank: int, parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if part.unit != unit:
                yield part
                continue
            order = children if part.kind is EventKind.FORWARD else children[::-1]
            yield replace(part, seconds=part.seconds * rest)
            for index, share in order:
                yield Part(part.kind, index, part.seconds * share)

    changed = measured.with_passes(change, units=tuple(units))
    parts = [(unit, rest), *children]
    transfers = _split_over(measured.transfers, unit, parts)
    for kind in _COLLECTIVES:
        if (kind, unit) in measured.transfers:
            line = measured.fit(kind)
            for index, share in parts:
                transfers[kind, index] = line.at(measured.bytes_of((kind, unit)) * share)
    launches = _split_over(measured.launches, unit, parts)
    unreduced = {
        (number, index)
        for number, unreduced_unit in measured.unreduced
        for index in ([unreduced_unit] if unreduced_unit != unit else [index for index, _ in parts])
    }
    return replace(changed, transfers=transfers, launches=launches, unreduced=frozenset(unreduced))


def _split_over(
    seconds: Mapping[tuple[EventKind, int], float], unit: int, parts: Iterable[tuple[int, float]]
) -> dict[tuple[EventKind, int], float]:
    found = {key: value for key, value in seconds.items() if key[1] != unit}
    for (kind, owner), value in seconds.items():
        if owner == unit:
            found |= {(kind, index): value * share for index, share in parts}
    return found


_SIZES = (
    "num_elements", "gathered_bytes", "kept_bytes", "shard_bytes", "own_bytes", "gradient_bytes",
    "gradient_shard_bytes",
)  # fmt: skip


def _sum_of(units: Sequence[UnitFigures]) -> UnitFigures:
    sizes = {name: sum(getattr(unit, name) for unit in units) for name in _SIZES}
    label = f"{units[0].label} to {units[-1].label}"
    num_parameters = sum(unit.num_parameters for unit in units)
    return replace(units[0], label=label, num_parameters=num_parameters, **sizes)


def _scaled(unit: UnitFigures, share: float) -> UnitFigures:
    sizes = {name: round(getattr(unit, name) * share) for name in _SIZES}
    return replace(unit, **sizes)
