"""The same update with other units: small ones merged, a large one divided."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from shardwise.diagnose.measured import Measured
from shardwise.diagnose.recording import UnitFigures
from shardwise.forecast.replay import Part
from shardwise.schedule.events import EventKind

__all__ = ["divided", "merged"]

_COLLECTIVES = (EventKind.GATHER, EventKind.REDUCE)


def merged(measured: Measured, group: Sequence[int]) -> Measured:
    """With the units ``group``, which follow each other, as one: the first of them."""
    first, *others = group
    into = dict.fromkeys(group, first)
    units = list(measured.units)
    units[first] = _sum_of([units[unit] for unit in group])
    for unit in others:
        units[unit] = _scaled(units[unit], 0.0)

    def change(parts: Sequence[Part]) -> Iterator[Part]:
        named = (replace(part, unit=into.get(part.unit, part.unit)) for part in parts)
        for _, same in groupby(named, key=lambda part: (part.kind, part.unit)):
            together = list(same)
            yield replace(together[0], seconds=sum(part.seconds for part in together))

    changed = measured.with_passes(change, units=tuple(units))
    transfers = dict(measured.transfers)
    launches = dict(measured.launches)
    for kind in _COLLECTIVES:
        size = sum(measured.bytes_of((kind, unit)) for unit in group)
        transfers[kind, first] = measured.fit(kind).at(size)
    for kind in EventKind:
        of_each = [launches.pop((kind, unit)) for unit in group if (kind, unit) in launches]
        if of_each:
            launches[kind, first] = max(of_each)
    return replace(changed, transfers=transfers, launches=launches)


def divided(measured: Measured, unit: int, shares: Sequence[float]) -> Measured:
    """With parts of ``unit`` as units inside it, which have these shares of it."""
    rest = max(0.0, 1.0 - sum(shares))
    whole, count = measured.units[unit], len(measured.units)
    units = list(measured.units)
    units[unit] = replace(_scaled(whole, rest), has_child_units=True)
    units += [
        replace(_scaled(whole, share), label=f"{whole.label}[{number}]", parent=unit, reshard=True)
        for number, share in enumerate(shares)
    ]
    inner = list(zip(range(count, len(units)), shares, strict=True))

    def change(parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if part.unit != unit:
                yield part
                continue
            order = inner if part.kind is EventKind.FORWARD else inner[::-1]
            yield replace(part, seconds=part.seconds * rest)
            for index, share in order:
                yield Part(part.kind, index, part.seconds * share)

    changed = measured.with_passes(change, units=tuple(units))
    of_parts = [(unit, rest), *inner]
    transfers = _shared_out(measured.transfers, unit, of_parts)
    for kind in _COLLECTIVES:
        if (kind, unit) in measured.transfers:
            line = measured.fit(kind)
            for index, share in of_parts:
                transfers[kind, index] = line.at(measured.bytes_of((kind, unit)) * share)
    launches = _shared_out(measured.launches, unit, of_parts)
    unreduced = {
        (number, index)
        for number, one in measured.unreduced
        for index in ([one] if one != unit else [index for index, _ in of_parts])
    }
    return replace(changed, transfers=transfers, launches=launches, unreduced=frozenset(unreduced))


def _shared_out(
    seconds: Mapping[tuple[EventKind, int], float],
    unit: int,
    parts: Iterable[tuple[int, float]],
) -> dict[tuple[EventKind, int], float]:
    found = {key: value for key, value in seconds.items() if key[1] != unit}
    for (kind, one), value in seconds.items():
        if one == unit:
            found |= {(kind, index): value * share for index, share in parts}
    return found


def _sum_of(units: Sequence[UnitFigures]) -> UnitFigures:
    return replace(
        units[0],
        label=f"{units[0].label} to {units[-1].label}",
        num_parameters=sum(one.num_parameters for one in units),
        num_elements=sum(one.num_elements for one in units),
        gathered_bytes=sum(one.gathered_bytes for one in units),
        kept_bytes=sum(one.kept_bytes for one in units),
        shard_bytes=sum(one.shard_bytes for one in units),
        own_bytes=sum(one.own_bytes for one in units),
        gradient_bytes=sum(one.gradient_bytes for one in units),
        gradient_shard_bytes=sum(one.gradient_shard_bytes for one in units),
    )


def _scaled(unit: UnitFigures, share: float) -> UnitFigures:
    return replace(
        unit,
        num_elements=round(unit.num_elements * share),
        gathered_bytes=round(unit.gathered_bytes * share),
        kept_bytes=round(unit.kept_bytes * share),
        shard_bytes=round(unit.shard_bytes * share),
        own_bytes=round(unit.own_bytes * share),
        gradient_bytes=round(unit.gradient_bytes * share),
        gradient_shard_bytes=round(unit.gradient_shard_bytes * share),
    )
