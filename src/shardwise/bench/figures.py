"""From what the ranks measured to the figures that are told."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.bench.rounds import Communication, RankRound, Turn
from shardwise.bench.setting import Setting

__all__ = ["LOSS_TOLERANCE", "Inspected", "Range", "Results", "Round", "Row", "Times"]

NOISE = 1.2  # of the median of the reference: longer, and the round is left out
# Nats, for the eye: engines add up the same numbers in other orders. In bf16 nothing bounds it.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Range:
    """Of one figure over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of each engine, all ranks together."""

    heat: int  # engines of one heat share processes; from 0
    reference_seconds: float  # of a fixed product of matrices, before the turns
    is_noisy: bool  # the reference took long, so it is left out of the medians
    load: float  # of the machine, over the last minute
    others: float  # cores that other processes kept busy meanwhile
    turns: dict[str, Turn]


@dataclass(frozen=True, slots=True)
class Times:
    """Of an engine, over the rounds that were not noisy."""

    ratio: Range  # seconds of a step to those of the base in the same round
    cpu_ratio: Range
    seconds: float
    cpu_seconds: float  # of a rank
    page_faults: float  # of a rank in a step
    busy_seconds: float | None  # of gathers and reductions; None where the engine does not say
    exposed_seconds: float | None
    loss_gap: float  # the largest distance from the base's loss in nats, noisy rounds included


@dataclass(frozen=True, slots=True)
class Inspected:
    """Bytes of a step and of memory, each of the rank that has most."""

    copied_bytes: int  # in a step, beyond what the model copies without any engine
    sent_bytes: int
    num_collectives: int
    live_peak: int  # bytes that a rank had taken at once
    resident_peak: int  # above what was resident before the model was made; malloc as it comes


@dataclass(slots=True)
class Row:
    """All that is known of an engine. None is what was not measured."""

    name: str
    times: Times | None = None
    inspected: Inspected | None = None
    trimmed_peak: int | None = None  # resident, with malloc's mmap threshold at 64 KB
    unit_microseconds: float | None = None  # a step of many tiny units, by their number

    @property
    def resident_peak(self) -> int | None:
        """The lower one, with malloc as it comes or with its threshold; which is what compares."""
        measured = (self.inspected.resident_peak if self.inspected else None, self.trimmed_peak)
        return min((peak for peak in measured if peak is not None), default=None)


@dataclass(frozen=True, slots=True)
class Results:
    """A whole comparison."""

    setting: Setting
    num_parameters: int
    rows: dict[str, Row]
    rounds: list[Round]
    tiny_rounds: list[Round]
    absent: tuple[str, ...]  # peers that are not installed

    @property
    def num_noisy(self) -> int:
        return sum(one.is_noisy for one in self.rounds)


def merge(heat: int, by_rank: Sequence[Sequence[RankRound]]) -> list[Round]:
    """One record of each round. A step takes as long as on the slowest rank; the rest are means."""
    references = [round_.reference_seconds for round_ in by_rank[0]]
    limit = NOISE * statistics.median(references)
    return [
        Round(
            heat=heat,
            reference_seconds=views[0].reference_seconds,
            is_noisy=views[0].reference_seconds > limit,
            load=views[0].load,
            others=_others(views),
            turns={name: _merge_turn([v.turns[name] for v in views]) for name in views[0].turns},
        )
        for views in zip(*by_rank, strict=True)
    ]


def summarise(rounds: Sequence[Round], base: str) -> dict[str, Times]:
    """The times of every engine that took turns with ``base``."""
    names = dict.fromkeys(name for round_ in rounds for name in round_.turns)
    return {name: _summarise(rounds, name, base) for name in names}


def _summarise(rounds: Sequence[Round], name: str, base: str) -> Times:
    shared = [round_ for round_ in rounds if name in round_.turns]
    quiet = [round_ for round_ in shared if not round_.is_noisy]
    turns = [round_.turns[name] for round_ in quiet]
    bases = [round_.turns[base] for round_ in quiet]
    told = [turn.communication for turn in turns if turn.communication is not None]
    return Times(
        ratio=_ratio(turns, bases, lambda turn: turn.seconds),
        cpu_ratio=_ratio(turns, bases, lambda turn: turn.cpu_seconds),
        seconds=statistics.median(turn.seconds for turn in turns),
        cpu_seconds=statistics.median(turn.cpu_seconds for turn in turns),
        page_faults=statistics.median(turn.page_faults for turn in turns),
        busy_seconds=statistics.median(one.busy for one in told) if told else None,
        exposed_seconds=statistics.median(one.exposed for one in told) if told else None,
        loss_gap=max(abs(one.turns[name].loss - one.turns[base].loss) for one in shared),
    )


def _ratio(turns: Sequence[Turn], bases: Sequence[Turn], of: Callable[[Turn], float]) -> Range:
    return Range.of([of(turn) / of(base) for turn, base in zip(turns, bases, strict=True)])


def _merge_turn(turns: Sequence[Turn]) -> Turn:
    told = [turn.communication for turn in turns if turn.communication is not None]
    return Turn(
        seconds=max(turn.seconds for turn in turns),
        cpu_seconds=_mean(turn.cpu_seconds for turn in turns),
        page_faults=round(_mean(turn.page_faults for turn in turns)),
        loss=_mean(turn.loss for turn in turns),
        communication=Communication(_mean(c.busy for c in told), _mean(c.exposed for c in told))
        if told
        else None,
    )


def _others(views: Sequence[RankRound]) -> float:
    """Cores that were busy with other things than the ranks; the harness itself is idle."""
    first = views[0]
    own = sum(view.ended.own - view.began.own for view in views)
    seconds = first.ended.now - first.began.now
    return max(0.0, (first.ended.all - first.began.all - own) / seconds)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
