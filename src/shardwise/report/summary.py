"""Summary of a recording by unit and rank: means over the steps whose events were recorded."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from shardwise.page.timeline import BarKind, Timeline
from shardwise.recording.format import MemorySample, RankRecording, UnitFigures

__all__ = ["EXPOSED", "RankSummary", "Summary", "UnitSummary", "summarize"]

STRAGGLER_THRESHOLD = 0.05  # share of a step; smaller differences are noise
_IN_STEPS = (BarKind.FORWARD, BarKind.BACKWARD, BarKind.STEP)
_AROUND_STEPS = (BarKind.DATA, BarKind.OPTIMIZER, BarKind.OTHER)
EXPOSED = (BarKind.WAIT_GATHER, BarKind.WAIT_REDUCE)
_UNIT_KINDS = (
    BarKind.GATHER,
    BarKind.WAIT_GATHER,
    BarKind.FORWARD,
    BarKind.BACKWARD,
    BarKind.REDUCE,
    BarKind.WAIT_REDUCE,
)


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """The time of one unit, with its other figures."""

    index: int
    figures: UnitFigures
    seconds: Mapping[BarKind, float]  # of a step, as means over ranks and steps

    @property
    def exposed_seconds(self) -> float:
        return sum(self.seconds[kind] for kind in EXPOSED)


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The figures of one rank. Seconds are those of a step, as means over steps."""

    rank: int
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    around_seconds: float  # data, optimizer and other spans between steps
    communication_bytes: float
    own_bytes: int
    padding_bytes: int
    padded_tokens: float | None  # padding as a share of all tokens
    peak: MemorySample | None  # the sample with the most memory

    @property
    def busy_seconds(self) -> float:
        """Time of the rank's own work; the rest is waiting, partly for other ranks."""
        return self.compute_seconds + self.around_seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a recording."""

    steps: tuple[int, ...]  # the steps that means are taken over
    units: tuple[UnitSummary, ...]
    ranks: tuple[RankSummary, ...]
    straggler: int | None  # the rank that the others wait for

    @property
    def seconds(self) -> float:
        """Step time of the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def exposed_seconds(self) -> float:
        return mean(rank.exposed_seconds for rank in self.ranks)

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of a step."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0

    @property
    def peak(self) -> tuple[int, MemorySample] | None:
        """The rank that held the most memory, and its peak."""
        found = ((rank.rank, rank.peak) for rank in self.ranks if rank.peak is not None)
        return max(found, key=lambda one: one[1].total, default=None)


def summarize(ranks: Sequence[RankRecording]) -> Summary:
    """Summarize a recording, as `read_recording` returns it."""
    detailed = set.intersection(*(set(rank.detailed_steps) for rank in ranks))
    steps = tuple(sorted(detailed))
    by_unit: defaultdict[tuple[int | None, BarKind], float] = defaultdict(float)
    rows = []
    for rank in ranks:
        by_kind = _add_up(rank, steps, by_unit)
        rows.append(_rank_row(rank, steps, by_kind))
    per_step = 1 / max(1, len(steps) * len(ranks))
    units = tuple(
        UnitSummary(index, figures, {kind: per_step * by_unit[index, kind] for kind in _UNIT_KINDS})
        for index, figures in enumerate(ranks[0].header.units)
    )
    return Summary(steps, units, tuple(rows), _straggler(rows))


def _add_up(
    rank: RankRecording,
    steps: Iterable[int],
    by_unit: defaultdict[tuple[int | None, BarKind], float],
) -> dict[BarKind, float]:
    timeline = Timeline(rank)
    by_kind: defaultdict[BarKind, float] = defaultdict(float)
    for step in steps:
        for bar in timeline.bars(step):
            by_unit[bar.unit, bar.kind] += bar.ended - bar.began
            by_kind[bar.kind] += bar.ended - bar.began
        for bar in timeline.bars_around(step):
            by_kind[bar.kind] += bar.ended - bar.began
    return by_kind


def _rank_row(
    rank: RankRecording, steps: Sequence[int], by_kind: dict[BarKind, float]
) -> RankSummary:
    own = [step for step in rank.steps if step.step in set(steps)] or list(rank.steps)
    tokens = sum(step.tokens or 0 for step in rank.steps)
    padded = sum(step.padded_tokens or 0 for step in rank.steps)
    num_steps = max(1, len(steps))
    return RankSummary(
        rank=rank.header.rank,
        seconds=mean(step.seconds for step in own) if own else 0.0,
        compute_seconds=sum(by_kind.get(kind, 0.0) for kind in _IN_STEPS) / num_steps,
        exposed_seconds=sum(by_kind.get(kind, 0.0) for kind in EXPOSED) / num_steps,
        around_seconds=sum(by_kind.get(kind, 0.0) for kind in _AROUND_STEPS) / num_steps,
        communication_bytes=mean(step.communication_bytes for step in own) if own else 0.0,
        own_bytes=sum(unit.own_bytes for unit in rank.header.units),
        padding_bytes=sum(unit.shard_bytes - unit.own_bytes for unit in rank.header.units),
        padded_tokens=padded / (tokens + padded) if tokens + padded else None,
        peak=max(rank.memory, key=lambda sample: sample.total, default=None),
    )


def _straggler(rows: Sequence[RankSummary]) -> int | None:
    slowest = max(rows, key=lambda row: row.busy_seconds)
    behind = slowest.busy_seconds - median(row.busy_seconds for row in rows)
    return slowest.rank if behind > STRAGGLER_THRESHOLD * slowest.seconds else None
