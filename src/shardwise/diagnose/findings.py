"""What makes the steps of a recording slow, in words, and what a change would save.

Each saving is that of the same update replayed with the change: the schedule of all ranks with the
durations that were measured (`forecast.replay`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, median

from shardwise.diagnose.changes import divided, merged
from shardwise.diagnose.measured import Measured, measure
from shardwise.diagnose.recording import RankRecording, UnitFigures
from shardwise.diagnose.summary import Finding
from shardwise.diagnose.words import bytes_text, seconds_text
from shardwise.forecast.replay import Replayed
from shardwise.schedule.events import EventKind

__all__ = ["find"]

_NOTABLE = 0.01  # of an update: what saves less is not said
_SMALL_UNIT = 1 << 20  # bytes
_LARGE_SHARE = 0.4  # of all that is gathered
_SLOW = 3.0  # times what the size of a collective explains
_SLOW_RANK = 1.05  # times the median
_PADDED = 0.1
_MAX_PREFETCH = 3  # more than now
_NEARLY = 0.9  # of the best saving
_MANY_TENSORS = 50
_FUSED_SHARE = 7 / 21  # of the passes over memory that AdamW makes one operation after the other


@dataclass(frozen=True, slots=True)
class _Run:
    ranks: Sequence[RankRecording]
    measured: Measured
    base: Replayed

    def saves(self, changed: Replayed) -> float:
        return self.base.seconds - changed.seconds

    def saves_bytes(self, changed: Replayed) -> int:
        return self.base.peak_gathered_bytes - changed.peak_gathered_bytes


def find(ranks: Sequence[RankRecording]) -> list[Finding]:
    """What slows the recorded steps, by what it costs, the most first.

    Raises:
        RecordingError: no update was recorded with all its events.
    """
    measured = measure(ranks)
    run = _Run(ranks, measured, measured.replayed())
    found = (finding for look in _LOOKS for finding in look(run))
    notable = [one for one in found if one.saves_seconds >= _NOTABLE * run.base.seconds]
    return sorted(notable, key=lambda one: -one.saves_seconds)


# -- how units are gathered and reduced ----------------------------------------------------------


def _prefetch(run: _Run) -> Iterator[Finding]:
    now = run.measured.prefetch
    tries = [
        (prefetch, replace(run.measured, prefetch=prefetch).replayed())
        for prefetch in range(now + 1, now + 1 + _MAX_PREFETCH)
    ]
    best = max(run.saves(changed) for _, changed in tries)
    if best <= 0:
        return
    prefetch, changed = next(one for one in tries if run.saves(one[1]) >= _NEARLY * best)
    waits = _waits(run)
    yield Finding(
        f"Compute waits {seconds_text(sum(waits.values()))} a step for gathers: raise prefetch "
        f"from {now} to {prefetch} ({_change_of(run.saves_bytes(changed))})",
        f"The longest waits are those for {_labels(run, waits)}.",
        run.saves(changed),
        run.saves_bytes(changed),
    )


def _reshard(run: _Run) -> Iterator[Finding]:
    if not any(unit.reshard and unit.gathered_bytes for unit in run.measured.units):
        return
    units = tuple(replace(unit, reshard=False, subgroup=0) for unit in run.measured.units)
    changed = replace(run.measured, units=units).replayed()
    yield Finding(
        "Units are gathered for forward and again for backward: reshard_after_forward=False "
        f"gathers them once ({_change_of(run.saves_bytes(changed))})",
        "It is the strategy 'zero2': parameters stay gathered from forward to backward.",
        run.saves(changed),
        run.saves_bytes(changed),
    )


def _accumulation(run: _Run) -> Iterator[Finding]:
    num_passes = run.measured.num_passes
    if num_passes == 1 or run.measured.unreduced:
        return
    held = sum(unit.gradient_bytes for unit in run.measured.units)
    yield Finding(
        f"{num_passes} micro-batches reduce gradients {num_passes} times: hold them until the "
        f"last ({_change_of(-held)})",
        "Call model.set_requires_gradient_sync(is_last) before each micro-batch.",
        run.saves(run.measured.replayed(holds_gradients=True)),
        -held,
    )


def _small_units(run: _Run) -> Iterator[Finding]:
    units = run.measured.units

    def kind(index: int) -> tuple[bool, int | None]:
        unit = units[index]
        is_small = 0 < unit.gathered_bytes < _SMALL_UNIT and not unit.has_child_units
        return is_small, unit.parent

    changed, num_small = run.measured, 0
    for (is_small, parent), indices in groupby(range(len(units)), key=kind):
        group = list(indices)
        if is_small and parent is not None and len(group) > 1:
            num_small += len(group)
            changed = merged(changed, group)
    if not num_small:
        return
    replayed = changed.replayed()
    yield Finding(
        f"{num_small} units have less than {bytes_text(_SMALL_UNIT)}: merge them "
        f"({_change_of(run.saves_bytes(replayed))})",
        "Each gather and reduction takes as long as its latency; wrap larger modules, or pass a "
        "size in parameters as units=.",
        run.saves(replayed),
        run.saves_bytes(replayed),
    )


def _large_units(run: _Run) -> Iterator[Finding]:
    units = run.measured.units
    total = sum(unit.gathered_bytes for unit in units)
    for index, unit in enumerate(units):
        shares = _blocks(run, unit)
        if unit.gathered_bytes <= _LARGE_SHARE * total or not shares:
            continue
        replayed = divided(run.measured, index, shares).replayed()
        yield Finding(
            f"Unit {unit.label} is {unit.gathered_bytes / total:.0%} of all that is gathered: "
            f"divide it into units ({_change_of(run.saves_bytes(replayed))})",
            f'Nothing computes while it is gathered; units="auto" makes its {len(shares)} blocks '
            "units of their own.",
            run.saves(replayed),
            run.saves_bytes(replayed),
            unit=index,
        )


def _blocks(run: _Run, unit: UnitFigures) -> list[float]:
    """The shares of the repeated blocks in ``unit``; if none are known, two halves of a child."""
    elements = run.ranks[0].header.info.get("blocks", {}).get(unit.label)
    if elements:
        return [number / max(1, unit.num_elements) for number in elements]
    return [] if unit.parent is None else [0.5, 0.5]


def _padding(run: _Run) -> Iterator[Finding]:
    changed, worst = dict(run.measured.transfers), (0.0, 0)
    for index, unit in enumerate(run.measured.units):
        own = [rank.header.units[index].own_bytes for rank in run.ranks]
        held = unit.shard_bytes * len(own)
        padded = 1.0 - sum(own) / held if held else 0.0
        if padded < _PADDED:
            continue
        worst = max(worst, (padded, index))
        for kind in (EventKind.GATHER, EventKind.REDUCE):
            if (kind, index) in changed:
                latency = min(run.measured.fit(kind).latency, changed[kind, index])
                changed[kind, index] = latency + (changed[kind, index] - latency) * (1 - padded)
    padded, index = worst
    if not padded:
        return
    own = [rank.header.units[index].own_bytes for rank in run.ranks]
    largest, label = own.index(max(own)), run.measured.units[index].label
    yield Finding(
        f"{padded:.0%} of what is gathered of unit {label} is padding: choose a finer granularity",
        f"Rank {largest} holds {bytes_text(max(own))} of it and another {bytes_text(min(own))},"
        ' and shards are as long as the longest; granularity="element" has no padding but '
        "alignment.",
        run.saves(replace(run.measured, transfers=changed).replayed()),
        unit=index,
        rank=largest,
    )


def _slow_collectives(run: _Run) -> Iterator[Finding]:
    for (kind, unit), seconds in run.measured.transfers.items():
        line = run.measured.fit(kind, without=[unit])
        usual = line.at(run.measured.bytes_of((kind, unit)))
        if not usual or seconds < _SLOW * usual:
            continue
        transfers = {**run.measured.transfers, (kind, unit): usual}
        label = run.measured.units[unit].label
        yield Finding(
            f"The {kind.value} of {label} takes {seconds_text(seconds)}, "
            f"{seconds / usual:.0f} times what its size explains",
            f"Others of its size take {seconds_text(usual)}. Look at what else uses the network "
            "or the memory of the hosts then, such as a checkpoint or an all-to-all.",
            run.saves(replace(run.measured, transfers=transfers).replayed()),
            unit=unit,
        )


# -- ranks ---------------------------------------------------------------------------------------


def _slow_rank(run: _Run) -> Iterator[Finding]:
    measured = run.measured
    seconds = [measured.compute_seconds(rank) for rank in range(len(run.ranks))]
    slowest = seconds.index(max(seconds))
    usual = median(sorted(seconds)[:-1] or [0.0])
    if not usual or seconds[slowest] < _SLOW_RANK * usual:
        return
    factor = usual / seconds[slowest]
    changed = measured.with_compute(
        lambda rank, of_part: of_part * factor if rank == slowest else of_part
    )
    yield Finding(
        f"Rank {slowest} computes {seconds[slowest] / usual:.2f} times as long as the others, "
        "which wait for it",
        f"It computes {seconds_text(seconds[slowest])} a step, the others "
        f"{seconds_text(usual)}. Compare its clock rate, temperature and batches with theirs.",
        run.saves(changed.replayed()),
        rank=slowest,
    )


def _data(run: _Run) -> Iterator[Finding]:
    seconds = _span_seconds(run, "data")
    slowest = seconds.index(max(seconds))
    programs = tuple(
        replace(program, outside_seconds=max(0.0, program.outside_seconds - of_rank))
        for program, of_rank in zip(run.measured.programs, seconds, strict=True)
    )
    yield Finding(
        f"Rank {slowest} waits {seconds_text(seconds[slowest])} a step for its data",
        "Load batches ahead: more workers of the DataLoader, pin_memory=True, or packed files.",
        run.saves(replace(run.measured, programs=programs).replayed()),
        rank=slowest,
    )


def _tokens(run: _Run) -> Iterator[Finding]:
    padded = []
    for rank in run.ranks:
        counts = [(s.tokens, s.padded_tokens or 0) for s in rank.steps if s.tokens is not None]
        padded.append(mean(p / max(1, t + p) for t, p in counts) if counts else 0.0)
    worst = padded.index(max(padded))
    if padded[worst] < _PADDED:
        return
    changed = run.measured.with_compute(lambda rank, seconds: seconds * (1.0 - padded[rank]))
    yield Finding(
        f"Rank {worst} pads {padded[worst]:.0%} of its tokens: pack sequences together",
        "Compute on padding counts for nothing; the saving takes compute to follow the tokens.",
        run.saves(changed.replayed()),
        rank=worst,
    )


def _optimizer(run: _Run) -> Iterator[Finding]:
    info = run.ranks[0].header.info
    num_tensors = info.get("optimizer_tensors", 0)
    if info.get("optimizer_way") != "loop" or num_tensors < _MANY_TENSORS:
        return
    seconds = max(_span_seconds(run, "optimizer"))
    yield Finding(
        f"The optimizer loops over {num_tensors} tensors: pass fused=True, or foreach=True",
        "Estimated, not replayed: a fused AdamW goes over memory 7 times instead of 21.",
        seconds * (1.0 - _FUSED_SHARE),
    )


_LOOKS: tuple[Callable[[_Run], Iterator[Finding]], ...] = (
    _prefetch,
    _reshard,
    _accumulation,
    _small_units,
    _large_units,
    _padding,
    _slow_collectives,
    _slow_rank,
    _data,
    _tokens,
    _optimizer,
)


def _span_seconds(run: _Run, name: str) -> list[float]:
    """What the spans ``name`` take of an update, by rank."""
    updates = max(1, len({step.updates for step in run.ranks[0].steps}))
    return [
        sum(span.seconds for span in rank.spans if span.name == name) / updates
        for rank in run.ranks
    ]


def _waits(run: _Run) -> dict[int, float]:
    """Seconds that the first rank waits for gathers in the replay, by unit."""
    waits: dict[int, float] = {}
    for timed in run.base.events[0]:
        if timed.event.kind is EventKind.WAIT and timed.ended > timed.began:
            unit = timed.event.unit
            waits[unit] = waits.get(unit, 0.0) + timed.ended - timed.began
    return waits


def _labels(run: _Run, waits: dict[int, float]) -> str:
    longest = sorted(waits, key=lambda unit: -waits[unit])[:3]
    return ", ".join(run.measured.units[unit].label for unit in longest) or "none"


def _change_of(saved_bytes: int) -> str:
    return f"{'-' if saved_bytes > 0 else '+'}{bytes_text(abs(saved_bytes))} of memory"
