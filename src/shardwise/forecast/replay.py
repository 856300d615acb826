"""A step on a clock: the schedule that the engine runs, with given durations.

Each rank has one stream that computes, one of gathers and one of reductions. A collective begins
when every rank has launched it and the one before it on its stream has ended. Ranks run the same
units in the same order, and each computes as long as it does.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardwise.plan.plan import UnitSettings
from shardwise.schedule.events import Event, EventKind
from shardwise.schedule.sequencer import Call, Outcome, ScheduledUnit, Sequencer

__all__ = ["Batch", "Costs", "Part", "Program", "Replayed", "TimedEvent", "batches", "replay"]


class _Unit(ScheduledUnit, Protocol):
    @property
    def parent(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Compute that begins with the forward or the backward of a unit, and lasts until the next."""

    kind: EventKind  # FORWARD or BACKWARD
    unit: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank computes from one update of the parameters to the next."""

    passes: tuple[tuple[Part, ...], ...]  # one for each micro-batch
    outside_seconds: float = 0.0  # data, optimizer and what else is not in a pass


@dataclass(frozen=True, slots=True)
class Costs:
    """How long the events of a unit take, in seconds."""

    transfer: Callable[[EventKind, int], float]  # a collective, once every rank has launched it
    launch: Callable[[EventKind, int], float] = lambda _kind, _unit: 0.0  # of compute's stream
    interference: float = 0.0  # by how much compute slows down while a collective runs
    has_one_link: bool = False  # gathers and reductions take turns


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event that was replayed; times as those of a `Record`."""

    event: Event
    step: int
    began: float
    ended: float
    span: tuple[float, float] | None = None  # of its collective, from the launch on this rank


@dataclass(frozen=True, slots=True)
class Replayed:
    """One update, replayed."""

    seconds: float  # of the slowest rank
    exposed_seconds: tuple[float, ...]  # by rank: compute waited for collectives
    peak_gathered_bytes: int
    events: tuple[tuple[TimedEvent, ...], ...]  # by rank


@dataclass(frozen=True)
class _Schedule:
    units: Sequence[_Unit]
    prefetch: int


def replay(
    units: Sequence[_Unit],
    programs: Sequence[Program],
    costs: Costs,
    *,
    prefetch: int,
    holds_gradients: bool = False,
    unreduced: Collection[tuple[int, int]] = (),
) -> Replayed:
    """Replay one update on all ranks, as it runs from the second on.

    Args:
        units: of the plan.
        programs: of each rank; they differ in durations alone.
        costs: how long events take.
        prefetch: how many units are gathered ahead.
        holds_gradients: only the last pass reduces gradients.
        unreduced: passes, and units whose gradients are not reduced in them.
    """
    passes = programs[0].passes
    order = batches(
        units, passes, prefetch=prefetch, holds_gradients=holds_gradients, unreduced=unreduced
    )
    shared = _Collectives(len(programs), costs)
    ranks = [_Rank(rank, program, order, costs, shared) for rank, program in enumerate(programs)]
    running = [(rank, rank.run()) for rank in ranks]
    while running:  # each goes on until it waits for a collective that some rank has not launched
        running = [(rank, run) for rank, run in running if next(run, "ended") != "ended"]
    gathered = peak = 0
    for _, _, events in order:
        for event in events:
            gathered += event.gathered_change
            peak = max(peak, gathered)
    return Replayed(
        seconds=max(rank.now for rank in ranks),
        exposed_seconds=tuple(rank.exposed for rank in ranks),
        peak_gathered_bytes=peak,
        events=tuple(tuple(rank.finished()) for rank in ranks),
    )


_STREAMS = {
    EventKind.GATHER: EventKind.GATHER,
    EventKind.RESHARD_TO_SUBGROUP: EventKind.GATHER,
    EventKind.REDUCE: EventKind.REDUCE,
}
_WAITS_FOR = {EventKind.WAIT: EventKind.GATHER, EventKind.FINISH_REDUCE: EventKind.REDUCE}

# The number of a pass, that of a part in it, and the events before that part; -1: after the last.
Batch = tuple[int, int, list[Event]]


def batches(
    units: Sequence[_Unit],
    passes: Sequence[Sequence[Part]],
    *,
    prefetch: int,
    holds_gradients: bool = False,
    unreduced: Collection[tuple[int, int]] = (),
) -> list[Batch]:
    """The events of one update, from the second one on; arguments as those of `replay`."""
    settings = [UnitSettings() for _ in units]
    sequencer = Sequencer(_Schedule(units, prefetch), settings)
    found: list[Batch] = []
    for _ in range(2):
        found.clear()
        for number, parts in enumerate(passes):
            is_last = number == len(passes) - 1
            for unit, chosen in enumerate(settings):
                reduces = is_last or not holds_gradients
                chosen.reduce_grads = reduces and (number, unit) not in unreduced
            found += _events_of_pass(units, sequencer, number, parts)
    return found


def _events_of_pass(
    units: Sequence[_Unit], sequencer: Sequencer, number: int, parts: Sequence[Part]
) -> Iterator[Batch]:
    trained = {part.unit for part in parts if part.kind is EventKind.BACKWARD}
    stack: list[Call] = []
    unvisited: defaultdict[int, list[Call]] = defaultdict(list)
    in_backward = False

    def leave(until: int | None) -> list[Event]:
        """Units that do not enclose ``until`` have computed."""
        events: list[Event] = []
        enclosing = _enclosing(units, until)
        while stack and stack[-1].unit not in enclosing:
            call = stack.pop()
            is_trained = call.unit in trained
            outcome = Outcome.DIFFERENTIABLE if is_trained else Outcome.DETACHED
            events += sequencer.exit(call, outcome)
        return events

    for index, part in enumerate(parts):
        if part.kind is EventKind.FORWARD:
            events = leave(part.unit)
            call, entering = sequencer.enter(part.unit, grad=True, recomputed=in_backward)
            stack.append(call)
            unvisited[part.unit].append(call)
            yield number, index, events + entering
        else:
            events = leave(None)
            in_backward = True
            call = unvisited[part.unit].pop()
            yield number, index, events + sequencer.before_backward(call, task=0)
    yield number, -1, leave(None) + (sequencer.finish_backward(task=0) if in_backward else [])


def _enclosing(units: Sequence[_Unit], unit: int | None) -> set[int]:
    """The units around ``unit``."""
    found: set[int] = set()
    while unit is not None and (unit := units[unit].parent) is not None:
        found.add(unit)
    return found


@dataclass
class _Collective:
    launched: list[float] = field(default_factory=list)  # by the ranks that have
    ended: float = 0.0


class _Collectives:
    """The collectives of an update, each the n-th of its stream."""

    def __init__(self, num_ranks: int, costs: Costs) -> None:
        self._num_ranks = num_ranks
        self._costs = costs
        self._all: defaultdict[EventKind, list[_Collective]] = defaultdict(list)
        self._free_at: defaultdict[EventKind | None, float] = defaultdict(float)
        self._spans: list[tuple[float, float]] = []  # of all collectives whose end is known

    def launch(self, event: Event, number: int, now: float) -> _Collective:
        """One rank launches the ``number``-th collective of its stream."""
        stream = _STREAMS[event.kind]
        if number == len(self._all[stream]):
            self._all[stream].append(_Collective())
        one = self._all[stream][number]
        one.launched.append(now)
        if self.is_launched(one):
            link = None if self._costs.has_one_link else stream
            began = max(*one.launched, self._free_at[link], now)
            one.ended = began + self._costs.transfer(event.kind, event.unit)
            self._free_at[link] = one.ended
            self._spans.append((began, one.ended))
        return one

    def is_launched(self, one: _Collective) -> bool:
        """Whether every rank has launched it, so that its end is known."""
        return len(one.launched) == self._num_ranks

    def compute(self, now: float, seconds: float) -> float:
        """When compute ends that would take ``seconds`` from ``now`` on if no collective ran."""
        slowed = 1.0 + self._costs.interference
        if self._num_ranks == 1:
            self._spans = [span for span in self._spans if span[1] > now]
        for time in sorted({time for span in self._spans for time in span if time > now}):
            is_slow = any(began <= now < ended for began, ended in self._spans)
            factor = slowed if is_slow else 1.0
            if now + seconds * factor <= time:
                return now + seconds * factor
            seconds -= (time - now) / factor
            now = time
        return now + seconds


class _Rank:
    def __init__(
        self,
        rank: int,
        program: Program,
        order: Sequence[Batch],
        costs: Costs,
        shared: _Collectives,
    ) -> None:
        self._program, self._order = program, order
        self._costs, self._shared = costs, shared
        self._rank = rank
        self._timed: list[tuple[TimedEvent, _Collective | None]] = []
        self.now = 0.0
        self.exposed = 0.0

    def run(self) -> Iterator[None]:
        """Go on to the end; yields where another rank has to go on first."""
        numbers: defaultdict[EventKind, int] = defaultdict(int)
        pending: dict[tuple[EventKind, int], _Collective] = {}
        for number, index, events in self._order:
            for event in events:
                began, one = self.now, None
                self.now += self._costs.launch(event.kind, event.unit)
                stream = _STREAMS.get(event.kind)
                if stream is not None:
                    one = self._shared.launch(event, numbers[stream], self.now)
                    numbers[stream] += 1
                    pending[stream, event.unit] = one
                elif event.kind in _WAITS_FOR:
                    awaited = pending.pop((_WAITS_FOR[event.kind], event.unit))
                    while not self._shared.is_launched(awaited):
                        yield
                    self.exposed += max(0.0, awaited.ended - self.now)
                    self.now = max(self.now, awaited.ended)
                self._timed.append((TimedEvent(event, number, began, self.now), one))
            if index >= 0:
                seconds = self._program.passes[number][index].seconds
                self.now = self._shared.compute(self.now, seconds)
        self.now += self._program.outside_seconds

    def finished(self) -> Iterator[TimedEvent]:
        """All events, those that launched a collective with its span."""
        for timed, one in self._timed:
            if one is None:
                yield timed
            else:
                span = (timed.ended, one.ended)
                yield TimedEvent(timed.event, timed.step, timed.began, timed.ended, span)
