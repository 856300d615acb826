"""Replays a step: the schedule that the engine runs, with given durations.

Each rank has one stream for compute, one for gathers and one for reductions. A collective begins
when every rank has launched it and the previous one on its stream has ended. All ranks run the same
units in the same order, but their compute may take different times.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, dropwhile
from typing import Protocol

from shardwise.plan.options import UnitSettings
from shardwise.plan.plan import Plan
from shardwise.recording.format import RecordedEvent
from shardwise.schedule.events import Event, EventKind
from shardwise.schedule.sequencer import Call, Outcome, ScheduledUnit, Sequencer

__all__ = [
    "Batch",
    "Costs",
    "Part",
    "Program",
    "Replayed",
    "batches",
    "replay",
    "schedule",
]


class _Unit(ScheduledUnit, Protocol):
    @property
    def parent(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Compute from the start of a unit's forward or backward to the start of the next one."""

    kind: EventKind  # FORWARD or BACKWARD
    unit: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Program:
    """The compute of one rank from one update of the parameters to the next."""

    passes: tuple[tuple[Part, ...], ...]  # one per micro-batch
    outside_seconds: float = 0.0  # data, optimizer and other work outside the passes


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of the events of a unit, in seconds."""

    transfer: Callable[[EventKind, int], float]  # a collective, from the last rank's launch
    launch: Callable[[EventKind, int], float] = lambda _kind, _unit: 0.0  # on the compute stream
    interference: float = 0.0  # relative slowdown of compute while a collective runs
    has_one_link: bool = False  # gathers and reductions take turns


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replayed update."""

    seconds: float  # time of the slowest rank
    exposed_seconds: tuple[float, ...]  # time that compute waited for collectives, by rank
    peak_gathered_bytes: int
    events: tuple[tuple[RecordedEvent, ...], ...]  # by rank; their steps are passes


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
    """Replay one update on all ranks, which is the second or a later one.

    Args:
        units: the units of the plan.
        programs: the compute of each rank; ranks differ only in durations.
        costs: durations of events.
        prefetch: number of units gathered ahead.
        holds_gradients: whether only the last pass reduces gradients.
        unreduced: pairs of a pass and a unit whose gradients are not reduced in it.
    """
    passes = programs[0].passes
    order = batches(
        units, passes, prefetch=prefetch, holds_gradients=holds_gradients, unreduced=unreduced
    )
    shared = _Collectives(len(programs), costs)
    ranks = [_Rank(program, order, costs, shared) for program in programs]
    running = [(rank, rank.run()) for rank in ranks]
    while running:  # each rank runs until it waits for a collective that is not launched everywhere
        running = [(rank, run) for rank, run in running if next(run, "ended") != "ended"]
    changes = (event.gathered_change for _, _, events in order for event in events)
    return Replayed(
        seconds=max(rank.now for rank in ranks),
        exposed_seconds=tuple(rank.exposed for rank in ranks),
        peak_gathered_bytes=max(accumulate(changes, initial=0)),
        events=tuple(tuple(rank.finished()) for rank in ranks),
    )


_STREAMS = {
    EventKind.GATHER: EventKind.GATHER,
    EventKind.RESHARD_TO_SUBGROUP: EventKind.GATHER,
    EventKind.REDUCE: EventKind.REDUCE,
}
_WAITS_FOR = {EventKind.WAIT: EventKind.GATHER, EventKind.FINISH_REDUCE: EventKind.REDUCE}


def schedule(plan: Plan, *, steps_in_backward: bool = False) -> list[Event]:
    """The events of one training step, from the second step on, if units run in module order.

    Every unit runs once, inside its parent. Its output needs gradients if the unit, a unit inside
    it or an earlier unit has a trainable parameter.

    Args:
        plan: the plan of the model.
        steps_in_backward: whether `sw.optimizer_in_backward` is used.
    """
    exited: list[int] = []
    stack: list[int] = []
    for index, unit in enumerate(plan.units):
        while stack and stack[-1] != unit.parent:
            exited.append(stack.pop())
        stack.append(index)
    exited += reversed(stack)
    reached = list(dropwhile(lambda index: not plan.units[index].is_trainable, exited))
    parts = [Part(EventKind.FORWARD, index, 0.0) for index in range(len(plan.units))]
    parts += [Part(EventKind.BACKWARD, index, 0.0) for index in reversed(reached)]
    order = batches(
        plan.units, [parts], prefetch=plan.prefetch, steps_in_backward=steps_in_backward
    )
    return [event for _, _, events in order for event in events]


# (pass, part, events before that part); part -1: events after the last part.
Batch = tuple[int, int, list[Event]]


def batches(
    units: Sequence[_Unit],
    passes: Sequence[Sequence[Part]],
    *,
    prefetch: int,
    holds_gradients: bool = False,
    unreduced: Collection[tuple[int, int]] = (),
    steps_in_backward: bool = False,
) -> list[Batch]:
    """Return the events of the second or a later update; arguments as in `replay`."""
    settings = [UnitSettings() for _ in units]
    sequencer = Sequencer(_Schedule(units, prefetch), settings)
    sequencer.steps_in_backward = steps_in_backward
    order: list[Batch] = []
    last: dict[int, Call] = {}  # by unit
    for _ in range(2):  # the second update is in the steady state
        order.clear()
        for number, parts in enumerate(passes):
            is_last = number == len(passes) - 1
            for unit, unit_settings in enumerate(settings):
                reduces = is_last or not holds_gradients
                unit_settings.reduce_grads = reduces and (number, unit) not in unreduced
            order += _events_of_pass(units, sequencer, number, parts, last)
    return order


def _events_of_pass(
    units: Sequence[_Unit],
    sequencer: Sequencer,
    number: int,
    parts: Sequence[Part],
    last: dict[int, Call],
) -> Iterator[Batch]:
    """``last`` is updated; a backward may be of one of these calls, if their graph was retained."""
    trained = {part.unit for part in parts if part.kind is EventKind.BACKWARD}
    stack: list[Call] = []
    unvisited: defaultdict[int, list[Call]] = defaultdict(list)
    in_backward = False

    def leave(until: int | None) -> list[Event]:
        """Exit the units that do not enclose ``until``."""
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
            last[part.unit] = call
            yield number, index, events + entering
        else:
            events = leave(None)
            in_backward = True
            if unvisited[part.unit]:
                events += sequencer.before_backward(unvisited[part.unit].pop(), task=0)
            elif part.unit in last:
                events += sequencer.before_backward(last[part.unit], task=0)
            yield number, index, events
    yield number, -1, leave(None) + (sequencer.finish_backward(task=0) if in_backward else [])


def _enclosing(units: Sequence[_Unit], unit: int | None) -> set[int]:
    """Return the units that enclose ``unit``."""
    found: set[int] = set()
    while unit is not None and (unit := units[unit].parent) is not None:
        found.add(unit)
    return found


@dataclass
class _Collective:
    launched: list[float] = field(default_factory=list)  # launch times, in order of launch
    ended: float = 0.0


class _Collectives:
    """The collectives of an update, numbered by stream."""

    def __init__(self, num_ranks: int, costs: Costs) -> None:
        self._num_ranks = num_ranks
        self._costs = costs
        self._all: defaultdict[EventKind, list[_Collective]] = defaultdict(list)
        self._free_at: defaultdict[EventKind | None, float] = defaultdict(float)
        self._spans: list[tuple[float, float]] = []  # spans of the collectives whose end is known

    def launch(self, event: Event, number: int, now: float) -> _Collective:
        """Launch the ``number``-th collective of a stream on one rank."""
        stream = _STREAMS[event.kind]
        if number == len(self._all[stream]):
            self._all[stream].append(_Collective())
        collective = self._all[stream][number]
        collective.launched.append(now)
        if self.is_launched(collective):
            link = None if self._costs.has_one_link else stream
            began = max(*collective.launched, self._free_at[link], now)
            collective.ended = began + self._costs.transfer(event.kind, event.unit)
            self._free_at[link] = collective.ended
            self._spans.append((began, collective.ended))
        return collective

    def is_launched(self, collective: _Collective) -> bool:
        """Whether every rank has launched the collective, so that its end is known."""
        return len(collective.launched) == self._num_ranks

    def compute(self, now: float, seconds: float) -> float:
        """Return the end of compute that starts now and takes ``seconds`` without interference."""
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
        self, program: Program, order: Sequence[Batch], costs: Costs, shared: _Collectives
    ) -> None:
        self._program, self._order = program, order
        self._costs, self._shared = costs, shared
        self._timed: list[tuple[RecordedEvent, _Collective | None]] = []
        self.now = 0.0
        self.exposed = 0.0

    def run(self) -> Iterator[None]:
        """Run to the end; yield whenever another rank must run first."""
        numbers: defaultdict[EventKind, int] = defaultdict(int)
        pending: dict[tuple[EventKind, int], _Collective] = {}
        for number, index, events in self._order:
            for event in events:
                began, collective = self.now, None
                self.now += self._costs.launch(event.kind, event.unit)
                stream = _STREAMS.get(event.kind)
                if stream is not None:
                    collective = self._shared.launch(event, numbers[stream], self.now)
                    numbers[stream] += 1
                    pending[stream, event.unit] = collective
                elif event.kind in _WAITS_FOR:
                    awaited = pending.pop((_WAITS_FOR[event.kind], event.unit))
                    while not self._shared.is_launched(awaited):
                        yield
                    self.exposed += max(0.0, awaited.ended - self.now)
                    self.now = max(self.now, awaited.ended)
                timed = RecordedEvent(number, event.kind, event.unit, event.bytes, began, self.now)
                self._timed.append((timed, collective))
            if index >= 0:
                seconds = self._program.passes[number][index].seconds
                self.now = self._shared.compute(self.now, seconds)
        self.now += self._program.outside_seconds

    def finished(self) -> Iterator[RecordedEvent]:
        """Yield all events; those that launched a collective that moves anything have its span."""
        for timed, collective in self._timed:
            if collective is not None and collective.ended > timed.ended:
                yield replace(timed, spans=((timed.ended, collective.ended),))
            else:
                yield timed
