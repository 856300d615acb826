"""From the measurements of the ranks to the figures of the report."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.bench.options import Setting
from shardwise.bench.rounds import Communication, RankRound, Turn

__all__ = ["LOSS_TOLERANCE", "Inspected", "Range", "Results", "Round", "Row", "Times"]

NOISE = 1.2  # times the median of the reference; a round above it is left out
# In nats, for fp32: engines add up the same numbers in different orders.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one figure over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of each engine, merged over ranks."""

    heat: int  # engines of one heat share processes; from 0
    reference_seconds: float  # of a fixed product of matrices, before the turns
    is_noisy: bool  # the reference took long, so the medians leave it out
    load: float  # of the machine, averaged over the last minute
    others: float  # cores that other processes kept busy
    turns: dict[str, Turn]


@dataclass(frozen=True, slots=True)
class Times:
    """The times of an engine over the rounds that were not noisy."""

    ratio: Range  # seconds of a step to those of the base in the same round
    cpu_ratio: Range
    seconds: float
    cpu_seconds: float  # per rank
    page_faults: float  # per rank and step
    busy_seconds: float | None  # of gathers and reductions; None if not recorded
    exposed_seconds: float | None
    loss_gap: float  # the largest difference from the base's loss in nats, over all rounds


@dataclass(frozen=True, slots=True)
class Inspected:
    """Traffic and memory, each the maximum over ranks."""

    copied_bytes: int  # per step, minus what the model copies without an engine
    sent_bytes: int
    num_collectives: int
    live_peak: int  # allocated bytes
    resident_peak: int  # above the bytes before the model was made, with malloc's defaults


@dataclass(slots=True)
class Row:
    """The results of one engine; None for what was not measured."""

    name: str
    times: Times | None = None
    inspected: Inspected | None = None
    trimmed_peak: int | None = None  # resident, with malloc's mmap threshold at 64 KB
    unit_microseconds: float | None = None  # a step of many tiny units, divided by their number

    @property
    def resident_peak(self) -> int | None:
        """The lower of the peaks with malloc's default and with its threshold lowered."""
        measured = (self.inspected.resident_peak if self.inspected else None, self.trimmed_peak)
        return min((peak for peak in measured if peak is not None), default=None)


@dataclass(frozen=True, slots=True)
class Results:
    """A comparison."""

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
    """Merge the ranks of each round: a step's time is the slowest rank's, the rest are means."""
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
    """The times of every engine relative to ``base``."""
    names = dict.fromkeys(name for round_ in rounds for name in round_.turns)
    return {name: _summarise(rounds, name, base) for name in names}


def _summarise(rounds: Sequence[Round], name: str, base: str) -> Times:
    shared = [round_ for round_ in rounds if name in round_.turns]
    quiet = [round_ for round_ in shared if not round_.is_noisy]
    turns = [round_.turns[name] for round_ in quiet]
    bases = [round_.turns[base] for round_ in quiet]
    recorded = [turn.communication for turn in turns if turn.communication is not None]
    return Times(
        ratio=_ratio(turns, bases, lambda turn: turn.seconds),
        cpu_ratio=_ratio(turns, bases, lambda turn: turn.cpu_seconds),
        seconds=statistics.median(turn.seconds for turn in turns),
        cpu_seconds=statistics.median(turn.cpu_seconds for turn in turns),
        page_faults=statistics.median(turn.page_faults for turn in turns),
        busy_seconds=statistics.median(one.busy for one in recorded) if recorded else None,
        exposed_seconds=statistics.median(one.exposed for one in recorded) if recorded else None,
        loss_gap=max(abs(one.turns[name].loss - one.turns[base].loss) for one in shared),
    )


def _ratio(turns: Sequence[Turn], bases: Sequence[Turn], of: Callable[[Turn], float]) -> Range:
    return Range.of([of(turn) / of(base) for turn, base in zip(turns, bases, strict=True)])


def _merge_turn(turns: Sequence[Turn]) -> Turn:
    recorded = [turn.communication for turn in turns if turn.communication is not None]
    communication = None
    if recorded:
        busy = _mean(one.busy for one in recorded)
        communication = Communication(busy, _mean(one.exposed for one in recorded))
    return Turn(
        seconds=max(turn.seconds for turn in turns),
        cpu_seconds=_mean(turn.cpu_seconds for turn in turns),
        page_faults=round(_mean(turn.page_faults for turn in turns)),
        loss=_mean(turn.loss for turn in turns),
        communication=communication,
    )


def _others(views: Sequence[RankRound]) -> float:
    """Cores that other processes kept busy; the harness itself is idle."""
    first = views[0]
    own = sum(view.ended.own - view.began.own for view in views)
    seconds = first.ended.now - first.began.now
    return max(0.0, (first.ended.all - first.began.all - own) / seconds)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
