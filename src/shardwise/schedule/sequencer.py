"""When everything happens: one state machine that turns calls of units into events.

The engine reports what its hooks see (a unit is entered, left, reached by backward) and performs
the events that come back; `schedule` reports an imagined step to the same machine. So a forecast
is what the engine would do, by construction.

Two blocks inside a root, prefetch=1, from the second step on::

    forward    gather root, gather 0, wait root | gather 1, wait 0 | free 0, wait 1 |
    backward   BACKWARD root | gather 0, BACKWARD 1 | free 1, reduce 1, BACKWARD 0 |
               free 0, reduce 0, free root, collect 1, collect 0, reduce root, collect root

What is decided here, and why:

- *Order* is that of the last pass. Ranks run the same program, so they see the same order, and a
  collective that is launched ahead on one rank is launched ahead on all.
- *Backward* visits calls by their exit, last first. A call that no gradient reaches on this rank
  is visited all the same, because one may reach it on another.
- *A call is finished* when backward reaches one that had ended before it began: autograd runs
  nodes by descending age, so nothing of the younger call is left. Counting gradients instead
  would wait for ever for an unused parameter.
- *Two reductions* are under way at most, and the root's alone: nothing is left to compute then.
- *A unit lingers* after its call until another is entered, for the next may be the same unit, or
  the first of backward.
- *A unit is stepped in backward*, if the user wants that, when its gradients are collected and all
  its calls of this step were walked. Where that cannot be known, at the end of backward.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice

from shardwise.errors import StepError
from shardwise.plan.plan import Plan
from shardwise.schedule.events import Event, EventKind

__all__ = ["Call", "Outcome", "Sequencer", "schedule"]


class Outcome(Enum):
    """How a unit's forward ended."""

    DIFFERENTIABLE = auto()  # backward may reach what it returned
    HIDDEN = auto()  # backward may reach something that it did not return
    DETACHED = auto()  # backward cannot reach it
    FAILED = auto()  # it raised


@dataclass(eq=False, slots=True)
class Pass:
    """One outermost forward, or one recomputation inside backward."""

    recomputed: bool
    grad: bool
    expected: tuple[int, ...]  # units in the order in which the last such pass entered them
    calls: list["Call"] = field(default_factory=list)
    of_unit: defaultdict[int, list["Call"]] = field(default_factory=lambda: defaultdict(list))
    on_track: bool = True

    def note(self, call: "Call") -> None:
        position = len(self.calls)
        known = position < len(self.expected) and self.expected[position] == call.unit
        self.on_track = self.on_track and known
        self.calls.append(call)
        self.of_unit[call.unit].append(call)

    @property
    def upcoming(self) -> Iterable[int]:
        return islice(self.expected, len(self.calls), None) if self.on_track else ()

    @property
    def differentiable(self) -> bool:
        return any(call.differentiable for call in self.calls)


@dataclass(eq=False, slots=True)
class Call:
    """One run of a unit's forward."""

    unit: int  # index in the plan
    of: Pass
    entered: int
    exited: int = -1
    outcome: Outcome = Outcome.DETACHED

    @property
    def differentiable(self) -> bool:
        return self.outcome in (Outcome.DIFFERENTIABLE, Outcome.HIDDEN)


class Walk:
    """One backward through the calls of one pass."""

    def __init__(self, of: Pass) -> None:
        calls = [call for call in of.calls if call.differentiable]
        self._unvisited = deque(sorted(calls, key=lambda call: -call.exited))
        self._awaited = set(calls)  # the same ones
        self._visited: dict[Call, None] = {}  # and not finished
        self.num_calls = Counter(call.unit for call in calls)
        self._num_left = self.num_calls.copy()  # calls that are not finished

    @property
    def upcoming(self) -> Iterator[int]:
        return (call.unit for call in self._unvisited)

    @property
    def units_in_use(self) -> set[int]:
        return {call.unit for call in self._visited}

    def visits_until(self, last: Call | None) -> Iterator[Call]:
        """Unvisited calls up to ``last`` (all of them for None), each visited as it is yielded."""
        while self._unvisited and (last is None or last in self._awaited):
            call = self._unvisited.popleft()
            self._awaited.discard(call)
            self._visited[call] = None
            yield call

    def finish_younger(self, than: int) -> Iterator[Call]:
        """Visited calls that began after tick ``than``, youngest first, finished as yielded."""
        younger = sorted(
            (call for call in self._visited if call.entered > than), key=lambda call: -call.entered
        )
        for call in younger:
            del self._visited[call]
            self._num_left[call.unit] -= 1
            yield call

    def is_outstanding(self, unit: int) -> bool:
        return self._num_left[unit] > 0


class Sequencer:
    """Turns what happens to a model's units into the events that must follow.

    Every method returns the events to perform, in order, before the caller goes on.
    """

    def __init__(self, plan: Plan) -> None:
        self._units = plan.units
        self._prefetch = plan.prefetch
        self._tick = 0
        self._stack: list[Call] = []
        self._expected: dict[bool, tuple[int, ...]] = {False: (), True: ()}
        self._walks: dict[int, dict[Pass, Walk]] = {}  # by the id of autograd's graph task
        self.synchronizes = [True] * len(plan.units)  # or gradients are held until it does
        self.crosses = [True] * len(plan.units)  # or they are summed within the row only
        self._held: set[int] = set()  # units whose gradients wait for either
        self._is_accumulating = False  # no optimizer steps before the next backward
        self._kept: set[int] = set()  # a part of them is, for a smaller group
        self._gathered: set[int] = set()
        self._waited: set[int] = set()
        self._ahead: set[int] = set()  # gathered by forward prefetch and not entered yet
        self._by_hand: set[int] = set()  # gathered between steps, for the next
        self.reshards = [unit.reshard for unit in plan.units]  # after forward
        self._lingering: int | None = None
        self._reducing: deque[int] = deque()
        self._events: list[Event] = []
        self.steps_in_backward = False
        self._calls_left: Counter[int] = Counter()  # of forward, that no backward has walked yet
        self._unstepped: set[int] = set()  # collected, and more may come
        self._changed: dict[int, tuple[int, str]] = {}  # unit to when, and which parameters

    # -- forward ---------------------------------------------------------------------------------

    def enter(self, unit: int, *, grad: bool, recomputed: bool = False) -> tuple[Call, list[Event]]:
        """A unit's forward begins.

        Args:
            unit: index in the plan.
            grad: autograd records.
            recomputed: it runs inside backward, as activation checkpointing does.
        """
        of = self._pass(grad=grad, recomputed=recomputed)
        call = Call(unit, of, entered=self._next_tick())
        of.note(call)
        self._stack.append(call)
        self._ahead.discard(unit)
        if not of.on_track:
            self._free_ahead()
        window = [unit, *self._distinct(of.upcoming, self._prefetch)]
        self._end_lingering(keep=window)
        self._gather(unit)
        self._ahead.update(ahead for ahead in window[1:] if self._gather(ahead))
        self._wait(unit)
        self._emit(EventKind.FORWARD, unit)
        return call, self._flush()

    def exit(self, call: Call, outcome: Outcome) -> list[Event]:
        """A unit's forward ends; ``call`` is what `enter` returned."""
        while self._stack.pop() is not call:
            pass
        call.exited = self._next_tick()
        call.outcome = outcome
        if call.of.grad and not call.of.recomputed:
            self._calls_left[call.unit] += 1  # a detached one, too: it may be recomputed
        if not self._is_kept_for_backward(call):
            self._end_lingering()
            if call.differentiable:
                self._lingering = call.unit
            else:
                self._free(call.unit, keep=False)
        if not self._stack or self._stack[-1].of is not call.of:
            self._end_pass(call.of, failed=outcome is Outcome.FAILED)
        return self._flush()

    # -- backward --------------------------------------------------------------------------------

    def join_backward(self, task: int) -> None:
        """Autograd's graph task ``task`` is under way until `finish_backward`."""
        self._walks.setdefault(task, {})

    def before_backward(self, call: Call, task: int) -> list[Event]:
        """Gradients reach what ``call`` returned, in autograd's graph task ``task``."""
        walks = self._walks.setdefault(task, {})
        if call.of not in walks:
            walks[call.of] = Walk(call.of)
        walk = walks[call.of]
        window = self._window(walk.upcoming)
        for of, other in walks.items():
            if of.calls[0].entered > call.exited:
                # Before any visit, so that it ends alike whichever of its calls were reached.
                self._complete(other, keep=window)
        for visited in walk.visits_until(call):
            self._visit(walk, visited)
        return self._flush()

    def finish_backward(self, task: int) -> list[Event]:
        """Autograd has run the last node of graph task ``task``."""
        for walk in self._walks.get(task, {}).values():
            self._complete(walk)
        self._walks.pop(task, None)
        if self._walks:  # an outer backward, which needs room to go on
            self._collect_until(1)
            return self._flush()
        for unit in sorted(self._held):
            if self.synchronizes[unit] and self.crosses[unit]:
                self._reduce(unit)
        self._collect_until(0)
        for unit in sorted(self._unstepped):
            self._step(unit)
        if not self.steps_in_backward:
            self._calls_left.clear()
        self._is_accumulating = not all((*self.synchronizes, *self.crosses))
        self._free_all()
        return self._flush()

    def abandon(self) -> list[Event]:
        """Backward raised: forget what is under way; reductions in flight count as collected."""
        self._walks.clear()
        self._reducing.clear()
        self._held.clear()
        self._calls_left.clear()
        self._unstepped.clear()
        self._is_accumulating = False
        self._free_all()
        return self._flush()

    def note_changed(self, unit: int, names: str) -> None:
        """Parameters of ``unit`` have new values: the backward of an earlier forward is refused."""
        self._changed[unit] = self._next_tick(), names

    def rest(self) -> list[Event]:
        """Somebody else will use the parameters now: keep shards only."""
        self._is_accumulating = False
        self._free_all()
        return self._flush()

    # -- by hand ---------------------------------------------------------------------------------

    def gather(self, unit: int) -> list[Event]:
        """Somebody wants ``unit`` gathered now, before it is entered."""
        if self._gather(unit):
            (self._ahead if self._stack else self._by_hand).add(unit)
        return self._flush()

    def wait(self, unit: int) -> list[Event]:
        """And wants to use it."""
        self._wait(unit)
        return self._flush()

    def free(self, unit: int) -> list[Event]:
        """And needs it no more; one that is in use stays."""
        self._by_hand.discard(unit)
        self._free(unit, keep=False)
        return self._flush()

    def is_gathered(self, unit: int) -> bool:
        """Whether its parameters are whole, or there is nothing to gather."""
        return unit in self._waited or not self._units[unit].gathered_bytes

    def is_in_use(self, unit: int) -> bool:
        """Whether a forward or backward of ``unit`` is under way."""
        walking = (walk for walks in self._walks.values() for walk in walks.values())
        return any(call.unit == unit for call in self._stack) or any(
            unit in walk.units_in_use for walk in walking
        )

    # -- steps of the above ----------------------------------------------------------------------

    def _pass(self, *, grad: bool, recomputed: bool) -> Pass:
        if self._stack and self._stack[-1].of.recomputed == recomputed:
            return self._stack[-1].of
        if recomputed:
            return Pass(recomputed, grad, expected=(), on_track=False)
        # An optimizer may have stepped since: what is gathered is stale, unless it was asked for.
        self._free_all(but=self._by_hand)
        self._by_hand = set()
        return Pass(recomputed, grad, self._expected[grad])

    def _end_pass(self, of: Pass, *, failed: bool) -> None:
        self._free_ahead()
        if of.recomputed:
            return
        if failed or not of.differentiable:
            self._free_all()
        if not failed:
            self._expected[of.grad] = tuple(call.unit for call in of.calls)

    def _is_kept_for_backward(self, call: Call) -> bool:
        if self.is_in_use(call.unit) or self._is_awaited(call.unit):
            return True
        calls = call.of.of_unit[call.unit]
        if any(other.outcome is Outcome.HIDDEN for other in calls):
            return True  # nothing would gather it before its backward
        return not self.reshards[call.unit] and any(c.differentiable for c in calls)

    def _visit(self, walk: Walk, call: Call) -> None:
        self._check_unchanged(call)
        window = self._window(chain((call.unit,), walk.upcoming))
        self._end_lingering(keep=window)
        for finished in walk.finish_younger(than=call.exited):
            self._finish(walk, finished, keep=window)
        for unit in window:
            self._gather(unit)
        self._collect_until(1)
        self._collect_unit(call.unit)
        self._wait(call.unit)
        self._emit(EventKind.BACKWARD, call.unit)

    def _complete(self, walk: Walk, keep: Collection[int] = ()) -> None:
        for call in walk.visits_until(None):
            self._visit(walk, call)
        for call in walk.finish_younger(than=-1):
            self._finish(walk, call, keep)

    def _finish(self, walk: Walk, call: Call, keep: Collection[int]) -> None:
        is_last = not walk.is_outstanding(call.unit)
        if call.unit not in keep:
            self._free(call.unit, keep=not is_last or self._is_needed_again(call.unit))
        if self._units[call.unit].gradient_bytes and is_last:
            self._calls_left[call.unit] -= walk.num_calls[call.unit]
            if self.synchronizes[call.unit]:
                self._reduce(call.unit)
            else:
                self._held.add(call.unit)

    def _is_needed_again(self, unit: int) -> bool:
        """Whether another backward follows before an optimizer changes the parameters."""
        steps = self.synchronizes[unit] and self.crosses[unit]
        return self._units[unit].two_level_gather and not steps

    def _reduce(self, unit: int) -> None:
        is_root = unit == 0 and self._units[unit].has_child_units
        self._collect_until(0 if is_root else 1)
        self._collect_unit(unit)
        self._emit(EventKind.REDUCE, unit)
        self._reducing.append(unit)
        if self.crosses[unit]:
            self._held.discard(unit)
        else:
            self._held.add(unit)

    def _step(self, unit: int) -> None:
        self._unstepped.discard(unit)
        self._calls_left[unit] = 0
        self._emit(EventKind.STEP, unit)

    # -- single decisions ------------------------------------------------------------------------

    def _window(self, units: Iterable[int]) -> list[int]:
        """Of units in the order of backward: the first, and those to gather while it computes."""
        following = iter(units)
        first = next(following, None)
        if first is None:
            return []
        # While an enclosing unit's own backward runs there is room for the first one inside it.
        ahead = max(self._prefetch, int(self._units[first].has_child_units))
        return [first, *self._distinct(following, ahead)]

    def _distinct(self, upcoming: Iterable[int], count: int) -> list[int]:
        """The next ``count`` units to have gathered: those with parameters, not being called."""
        chosen: list[int] = []
        in_use = {call.unit for call in self._stack} if count else ()
        for unit in upcoming if count else ():  # no further than needed: there may be hundreds
            if unit not in in_use and unit not in chosen and self._units[unit].gathered_bytes:
                chosen.append(unit)
                if len(chosen) == count:
                    break
        return chosen

    def _is_awaited(self, unit: int) -> bool:
        """Whether a backward in progress has gathered ``unit`` ahead."""
        walking = (walk for walks in self._walks.values() for walk in walks.values())
        return any(unit in self._distinct(walk.upcoming, self._prefetch) for walk in walking)

    def _gather(self, unit: int) -> bool:
        if unit in self._gathered or not self._units[unit].gathered_bytes:
            return False
        self._gathered.add(unit)
        if self._units[unit].two_level_gather:
            self._keep(unit)
        self._emit(EventKind.GATHER, unit)
        return True

    def _wait(self, unit: int) -> None:
        if unit in self._gathered and unit not in self._waited:
            self._waited.add(unit)
            self._emit(EventKind.WAIT, unit)

    def _free(self, unit: int, *, keep: bool) -> None:
        """Drop a gathered unit; with ``keep``, all but what a smaller group gathers it from."""
        if unit not in self._gathered or self.is_in_use(unit):
            return
        if keep and self._units[unit].subgroup:
            self._keep(unit)
        self._gathered.discard(unit)
        self._waited.discard(unit)
        self._ahead.discard(unit)
        self._emit(EventKind.FREE, unit)
        if not keep:
            self._drop(unit)

    def _keep(self, unit: int) -> None:
        if unit not in self._kept:
            self._kept.add(unit)
            self._emit(EventKind.KEEP, unit)

    def _drop(self, unit: int) -> None:
        outlives = self._units[unit].two_level_gather and self._is_accumulating
        if self.steps_in_backward and self.synchronizes[unit] and self.crosses[unit]:
            outlives = False  # it has stepped, whatever others wait for
        if unit in self._kept and not outlives and not self.is_in_use(unit):
            self._kept.discard(unit)
            self._emit(EventKind.DROP, unit)

    def _free_ahead(self) -> None:
        for unit in sorted(self._ahead):
            self._free(unit, keep=self._units[unit].two_level_gather)

    def _free_all(self, but: Collection[int] = ()) -> None:
        self._lingering = None
        for unit in sorted(self._gathered.difference(but)):
            self._free(unit, keep=False)
        for unit in sorted(self._kept):
            self._drop(unit)

    def _end_lingering(self, keep: Collection[int] = ()) -> None:
        if self._lingering is not None and self._lingering not in keep:
            self._free(self._lingering, keep=True)
        self._lingering = None

    def _collect_until(self, left: int) -> None:
        while len(self._reducing) > left:
            unit = self._reducing.popleft()
            self._emit(EventKind.COLLECT, unit)
            if self.steps_in_backward and unit not in self._held:
                self._unstepped.add(unit)
                if not self._walks or self._calls_left[unit] == 0:
                    self._step(unit)

    def _collect_unit(self, unit: int) -> None:
        """Have the buffer of its gradients free, for another pass may have reduced it last."""
        while unit in self._reducing:
            self._collect_until(len(self._reducing) - 1)

    def _check_unchanged(self, call: Call) -> None:
        changed, names = self._changed.get(call.unit, (-1, ""))
        if call.entered < changed:
            way_out = (
                "sw.optimizer_in_backward steps in the first backward that reduces gradients; call "
                "set_requires_gradient_sync(False) before all backwards of a step but the last"
                if self.steps_in_backward
                else "run the backward of a forward before the optimizer's step"
            )
            raise StepError(
                f"{names}: changed between a forward of {self._units[call.unit].label} and its "
                f"backward, whose gradient would be of neither value; {way_out}"
            )

    def _emit(self, kind: EventKind, unit: int) -> None:
        self._events.append(Event(kind, self._units[unit].label, self._bytes(kind, unit)))

    def _bytes(self, kind: EventKind, unit: int) -> int:
        match kind:
            case EventKind.GATHER | EventKind.FREE:
                return self._units[unit].gathered_bytes
            case EventKind.KEEP | EventKind.DROP:
                return self._units[unit].kept_bytes
            case EventKind.REDUCE:
                return self._units[unit].gradient_bytes
            case EventKind.COLLECT | EventKind.STEP:
                return self._units[unit].gradient_shard_bytes
            case _:
                return 0

    def _flush(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def schedule(plan: Plan, *, steps_in_backward: bool = False) -> list[Event]:
    """The events of one training step, from the second on, if units run in module order.

    The root encloses all others, and every unit runs once. What a unit returns is taken to need
    gradients if it, a unit inside it or one before it has a trainable parameter.
    ``steps_in_backward`` is what `sw.optimizer_in_backward` makes of it.
    """
    sequencer = Sequencer(plan)
    sequencer.steps_in_backward = steps_in_backward
    _imagine_step(plan, sequencer)
    return _imagine_step(plan, sequencer)


def _imagine_step(plan: Plan, sequencer: Sequencer) -> list[Event]:
    events: list[Event] = []
    exited: list[Call] = []
    trained = False

    def run(index: int) -> None:
        nonlocal trained
        unit = plan.units[index]
        call, entering = sequencer.enter(index, grad=True)
        events.extend(entering)
        for inner, other in enumerate(plan.units):
            if other.parent == index:
                run(inner)
        trained = trained or unit.gradient_bytes > 0
        events.extend(sequencer.exit(call, Outcome.DIFFERENTIABLE if trained else Outcome.DETACHED))
        exited.append(call)

    run(0)
    for call in reversed(exited):
        if call.differentiable:
            events.extend(sequencer.before_backward(call, task=0))
    return events + sequencer.finish_backward(task=0)
