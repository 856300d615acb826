"""Findings: what makes the steps of a recording slow, and how much a change would save.

The saving of a change comes from replaying the recorded update with that change: the schedule of
all ranks, with the measured durations (`forecast.time.replay`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, median

from shardwise.forecast.time.replay import Replayed
from shardwise.page.formatting import bytes_text, seconds_text
from shardwise.recording.format import RankRecording, UnitFigures
from shardwise.report.changes import merge_units, split_unit
from shardwise.report.measured import Measured, measure
from shardwise.schedule.events import EventKind

__all__ = ["Finding", "find", "savings"]

_MIN_SAVING = 0.01  # share of an update; smaller savings are not reported
_SMALL_UNIT = 1 << 20  # bytes
_LARGE_SHARE = 0.4  # share of all gathered bytes
_SLOW_FACTOR = 3.0  # times the duration that the collective's size explains
_SLOW_RANK_FACTOR = 1.05  # times the median
_MIN_PADDING = 0.1  # share of a buffer or of the tokens
_MAX_EXTRA_PREFETCH = 3  # more than the recorded run
_NEARLY_BEST = 0.9  # share of the best saving
_MANY_TENSORS = 50
_FUSED_SHARE = 7 / 21  # passes over memory: fused AdamW / AdamW one operation after the other


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause of a slow step and its remedy."""

    title: str  # a sentence
    detail: str
    saves_seconds: float  # per update
    saves_bytes: int = 0  # at a rank's peak; negative if the change needs more memory
    unit: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    ranks: Sequence[RankRecording]
    measured: Measured
    base: Replayed

    def finding(
        self, title: str, detail: str, changed: Replayed, *, memory: bool = False, **place: int
    ) -> Finding:
        """Return a finding with the time and memory that ``changed`` saves.

        With ``memory``, the title ends with the memory. ``place`` is the unit or rank to show.
        """
        saved_bytes = self.base.peak_gathered_bytes - changed.peak_gathered_bytes
        if memory:
            title += f" ({_change_of(saved_bytes)})"
        saved_seconds = self.base.seconds - changed.seconds
        return Finding(title, detail, saved_seconds, saved_bytes, **place)


def savings(finding: Finding, step_seconds: float) -> list[str]:
    """Format what a finding would save: seconds with their share of a step, and memory."""
    lines = []
    if finding.saves_seconds:
        share = finding.saves_seconds / step_seconds if step_seconds else 0.0
        lines.append(f"saves {seconds_text(finding.saves_seconds)} ({share:.0%})")
    if finding.saves_bytes:
        verb = "costs" if finding.saves_bytes < 0 else "saves"
        lines.append(f"{verb} {bytes_text(abs(finding.saves_bytes))}")
    return lines


def find(ranks: Sequence[RankRecording]) -> list[Finding]:
    """Return what slows the recorded steps down, the most costly first."""
    measured = measure(ranks)
    run = _Run(ranks, measured, measured.replayed())
    findings = [finding for check in _CHECKS for finding in check(run)]
    notable = [one for one in findings if one.saves_seconds >= _MIN_SAVING * run.base.seconds]
    return sorted(notable, key=lambda finding: -finding.saves_seconds)


# -- how units are gathered and reduced ----------------------------------------------------------


def _prefetch(run: _Run) -> Iterator[Finding]:
    now = run.measured.prefetch
    trials = [
        (prefetch, replace(run.measured, prefetch=prefetch).replayed())
        for prefetch in range(now + 1, now + 1 + _MAX_EXTRA_PREFETCH)
    ]
    savings = [run.base.seconds - changed.seconds for _, changed in trials]
    if max(savings) <= 0:
        return
    best = next(n for n, saved in enumerate(savings) if saved >= _NEARLY_BEST * max(savings))
    prefetch, changed = trials[best]
    waits = _waits(run)
    longest = sorted(waits, key=lambda unit: -waits[unit])[:3]
    labels = ", ".join(run.measured.units[unit].label for unit in longest) or "none"
    yield run.finding(
        f"Compute waits {seconds_text(sum(waits.values()))} per step for gathers: raise prefetch "
        f"from {now} to {prefetch}",
        f"The longest waits are for {labels}.",
        changed,
        memory=True,
    )


def _reshard(run: _Run) -> Iterator[Finding]:
    if not any(unit.reshard and unit.gathered_bytes for unit in run.measured.units):
        return
    units = tuple(replace(unit, reshard=False, subgroup=0) for unit in run.measured.units)
    yield run.finding(
        "Units are gathered for forward and again for backward: reshard_after_forward=False "
        "gathers them once",
        "This is the strategy 'zero2': parameters stay gathered from forward to backward.",
        replace(run.measured, units=units).replayed(),
        memory=True,
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
        run.base.seconds - run.measured.replayed(holds_gradients=True).seconds,
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
            changed = merge_units(changed, group)
    if num_small:
        yield run.finding(
            f"{num_small} units have less than {bytes_text(_SMALL_UNIT)}: merge them",
            "Latency dominates their gathers and reductions. Wrap larger modules, or pass a size "
            "in parameters as units=.",
            changed.replayed(),
            memory=True,
        )


def _large_units(run: _Run) -> Iterator[Finding]:
    units = run.measured.units
    total = sum(unit.gathered_bytes for unit in units)
    for index, unit in enumerate(units):
        shares = _blocks(run, unit)
        if unit.gathered_bytes <= _LARGE_SHARE * total or not shares:
            continue
        yield run.finding(
            f"Unit {unit.label} is {unit.gathered_bytes / total:.0%} of all that is gathered: "
            "divide it into units",
            f'Nothing computes while it is gathered; units="auto" makes its {len(shares)} blocks '
            "units of their own.",
            split_unit(run.measured, index, shares).replayed(),
            unit=index,
            memory=True,
        )


def _blocks(run: _Run, unit: UnitFigures) -> list[float]:
    """Return the shares of the repeated blocks in ``unit``; two halves for a child without any."""
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
        if padded < _MIN_PADDING:
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
    yield run.finding(
        f"{padded:.0%} of the gathered buffer of unit {label} is padding: choose a finer "
        "granularity",
        f"Rank {largest} holds {bytes_text(max(own))} of it and another rank "
        f"{bytes_text(min(own))}, and every shard is as long as the longest. "
        'granularity="element" pads only for alignment.',
        replace(run.measured, transfers=changed).replayed(),
        unit=index,
        rank=largest,
    )


def _slow_collectives(run: _Run) -> Iterator[Finding]:
    for (kind, unit), seconds in run.measured.transfers.items():
        line = run.measured.fit(kind, without=unit)
        usual = line.at(run.measured.bytes_of((kind, unit)))
        if not usual or seconds < _SLOW_FACTOR * usual:
            continue
        transfers = {**run.measured.transfers, (kind, unit): usual}
        label = run.measured.units[unit].label
        yield run.finding(
            f"The {kind.value} of {label} takes {seconds_text(seconds)}, "
            f"{seconds / usual:.0f} times what its size explains",
            f"Others of its size take {seconds_text(usual)}. Find out what else uses the network "
            "or the hosts' memory at that time, such as a checkpoint or an all-to-all.",
            replace(run.measured, transfers=transfers).replayed(),
            unit=unit,
        )


# -- ranks ---------------------------------------------------------------------------------------


def _slow_rank(run: _Run) -> Iterator[Finding]:
    measured = run.measured
    seconds = [measured.compute_seconds(rank) for rank in range(len(run.ranks))]
    slowest = seconds.index(max(seconds))
    usual = median(sorted(seconds)[:-1] or [0.0])
    if not usual or seconds[slowest] < _SLOW_RANK_FACTOR * usual:
        return
    factor = usual / seconds[slowest]
    changed = measured.with_compute(
        lambda rank, part_seconds: part_seconds * factor if rank == slowest else part_seconds
    )
    yield run.finding(
        f"Rank {slowest} computes {seconds[slowest] / usual:.2f} times as long as the others, "
        "which wait for it",
        f"It computes for {seconds_text(seconds[slowest])} per step, the others for "
        f"{seconds_text(usual)}. Compare its clock rate, temperature and batches with theirs.",
        changed.replayed(),
        rank=slowest,
    )


def _data(run: _Run) -> Iterator[Finding]:
    seconds = _span_seconds(run, "data")
    slowest = seconds.index(max(seconds))
    programs = tuple(
        replace(program, outside_seconds=max(0.0, program.outside_seconds - data_seconds))
        for program, data_seconds in zip(run.measured.programs, seconds, strict=True)
    )
    yield run.finding(
        f"Rank {slowest} waits {seconds_text(seconds[slowest])} per step for its data",
        "Load batches ahead: more DataLoader workers, pin_memory=True, or packed files.",
        replace(run.measured, programs=programs).replayed(),
        rank=slowest,
    )


def _tokens(run: _Run) -> Iterator[Finding]:
    padded = []
    for rank in run.ranks:
        counts = [(s.tokens, s.padded_tokens or 0) for s in rank.steps if s.tokens is not None]
        padded.append(mean(p / max(1, t + p) for t, p in counts) if counts else 0.0)
    worst = padded.index(max(padded))
    if padded[worst] < _MIN_PADDING:
        return
    changed = run.measured.with_compute(lambda rank, seconds: seconds * (1.0 - padded[rank]))
    yield run.finding(
        f"Rank {worst} pads {padded[worst]:.0%} of its tokens: pack sequences together",
        "Compute on padding is wasted. The saving assumes that compute is proportional to tokens.",
        changed.replayed(),
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
        "Estimated, not replayed: a fused AdamW makes 7 passes over memory instead of 21.",
        seconds * (1.0 - _FUSED_SHARE),
    )


_CHECKS: tuple[Callable[[_Run], Iterator[Finding]], ...] = (
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
    updates = max(1, len({step.updates for step in run.ranks[0].steps}))
    return [
        sum(span.seconds for span in rank.spans if span.name == name) / updates
        for rank in run.ranks
    ]


def _waits(run: _Run) -> Mapping[int, float]:
    """Return the seconds that the first rank waits for gathers in the replay, by unit."""
    waits: defaultdict[int, float] = defaultdict(float)
    for event in run.base.events[0]:
        if event.event is EventKind.WAIT and event.seconds > 0:
            waits[event.unit] += event.seconds
    return waits


def _change_of(saved_bytes: int) -> str:
    if not saved_bytes:
        return "with the same memory"
    return f"{'-' if saved_bytes > 0 else '+'}{bytes_text(abs(saved_bytes))} of memory"
