"""When everything happens: one state machine that turns calls of units into events.

The engine reports what its hooks observe (a unit is entered, exited or reached by backward) and
performs the events that this machine returns. `forecast.time.replay` drives the same machine
through steps that it simulates, so a prediction and the engine's behavior cannot differ.

Two blocks inside a root, prefetch=1, from the second step on::

    forward    gather root, gather 0, wait root | gather 1, wait 0 | free 0, wait 1 |
    backward   BACKWARD root | gather 0, BACKWARD 1 | free 1, reduce 1, BACKWARD 0 |
               free 0, reduce 0, free root, finish 1, finish 0, reduce root, finish root

What is decided here, and why:

- *Units are gathered ahead* in the order of the last pass. All ranks run the same program, so they
  recorded the same order and launch the same collectives.
- *Backward visits calls* in reverse order of their exits. It also visits a call that no gradient
  reaches on this rank, because one may reach it on another rank.
- *A call is finished* when backward reaches another call that had exited before this one was
  entered: autograd runs the youngest nodes first, so no node of the younger call is left. Counting
  gradients instead would wait forever for an unused parameter.
- *A backward through a backward* (of `torch.func.grad`) keeps all units until its end: autograd
  may come back to any of them through tensors that are not outputs of units.
- *At most two reductions* run at once. The root's runs alone: nothing is left to compute then.
- *Freeing is delayed* after a call until another unit is entered, because the next call may be of
  the same unit, or the first one of backward.
- *With steps in backward*, a unit is updated when its gradients are complete and backward has
  visited all its calls of this step, or else at the end of backward.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from operator import attrgetter
from typing import Protocol

from shardwise.plan.options import UnitSettings
from shardwise.schedule.events import Event, EventKind
from shardwise.schedule.passes import BackwardPass, Call, Outcome, Pass

__all__ = ["Call", "Outcome", "ScheduledUnit", "Sequencer", "UnitState"]


class ScheduledUnit(Protocol):
    """The part of a `UnitPlan` that is used here."""

    @property
    def gathered_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def is_trainable(self) -> bool: ...
    @property
    def gradient_bytes(self) -> int: ...
    @property
    def gradient_shard_bytes(self) -> int: ...
    @property
    def reshard(self) -> bool: ...
    @property
    def subgroup(self) -> int: ...
    @property
    def two_level_gather(self) -> bool: ...
    @property
    def has_child_units(self) -> bool: ...
    @property
    def offloads_gradients(self) -> bool: ...


class Scheduled(Protocol):
    """The part of a `Plan` that is used here."""

    @property
    def units(self) -> Sequence[ScheduledUnit]: ...
    @property
    def prefetch(self) -> int: ...


class UnitState(Enum):
    """Where a unit's parameters are."""

    SHARDED = auto()  # each rank has its shard
    GATHERING = auto()  # their all-gather has been launched
    GATHERED = auto()  # compute may use them


_TRANSITIONS = {
    (UnitState.SHARDED, EventKind.GATHER): UnitState.GATHERING,
    (UnitState.GATHERING, EventKind.WAIT): UnitState.GATHERED,
    (UnitState.GATHERING, EventKind.FREE): UnitState.SHARDED,  # prefetched and not used
    (UnitState.GATHERED, EventKind.FREE): UnitState.SHARDED,
}


class Reservation(Enum):
    """Why a unit was gathered before its forward began."""

    PREFETCH = auto()  # for a later call of this pass
    REQUEST = auto()  # by the user between passes, for the next pass
    MICRO_BATCH = auto()  # kept by a backward for the next pass


_FOR_THE_NEXT_PASS = (Reservation.REQUEST, Reservation.MICRO_BATCH)


@dataclass(slots=True)
class UnitStatus:
    """The state of a unit and of its gradients on this rank."""

    state: UnitState = UnitState.SHARDED
    has_subgroup_shard: bool = False
    reservation: Reservation | None = None
    awaits_reduction: bool = False  # gradients are reduced in a later backward
    awaited_before: bool = False  # the same, before the backward that is running
    awaits_step: bool = False  # has reduced gradients, and may get more
    calls_left: int = 0  # forward calls that no backward has visited yet


_BYTES = {
    EventKind.GATHER: attrgetter("gathered_bytes"),
    EventKind.FREE: attrgetter("gathered_bytes"),
    EventKind.RESHARD_TO_SUBGROUP: attrgetter("kept_bytes"),
    EventKind.FREE_SUBGROUP: attrgetter("kept_bytes"),
    EventKind.REDUCE: attrgetter("gradient_bytes"),
    EventKind.FINISH_REDUCE: attrgetter("gradient_shard_bytes"),
    EventKind.STEP: attrgetter("gradient_shard_bytes"),
}


class Sequencer:
    """Turns the calls of a model's units into events.

    The caller must perform the events that a method returns, in order, before it continues.
    """

    def __init__(self, plan: Scheduled, settings: Sequence[UnitSettings] | None = None) -> None:
        self._units = plan.units
        self._gathers = any(unit.gathered_bytes for unit in plan.units)
        self._settings = settings or [UnitSettings() for _ in plan.units]
        self._prefetch = plan.prefetch
        self.steps_in_backward = False
        self._status = [UnitStatus() for _ in plan.units]
        self.tick = 0  # counts the calls that begin or end
        self._stack: list[Call] = []
        # By the first unit of a pass and whether autograd records it: the order of the last one.
        self._expected: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._backwards: dict[int, dict[Pass, BackwardPass]] = {}  # by id of autograd's graph task
        self._to_free: int | None = None
        self._reducing: deque[int] = deque()
        # Units whose gradients are copied to the host, to be stepped there: the copy of each runs
        # while the host steps the one before, after the next reduction was launched.
        self._arriving: deque[int] = deque()
        self._is_accumulating = False  # no optimizer steps before the next backward
        self._finished: set[int] = set()  # trainable units that the running backward is done with
        self.finished_again: int | None = None  # one that it reached in another forward as well
        self._events: list[Event] = []

    # -- forward ---------------------------------------------------------------------------------

    def enter(self, unit: int, *, grad: bool, recomputed: bool = False) -> tuple[Call, list[Event]]:
        """Begin the forward of a unit, by its index in the plan; ``grad``: autograd records it.

        It is ``recomputed`` if it runs inside backward, as with activation checkpointing.
        """
        forward_pass = self._pass(unit, grad=grad, recomputed=recomputed)
        self.tick += 1
        call = Call(unit, forward_pass, entered=self.tick)
        forward_pass.append(call)
        self._stack.append(call)
        if self._status[unit].reservation is Reservation.PREFETCH:
            self._status[unit].reservation = None
        if not forward_pass.on_track:
            self._free_prefetched()
        window = [unit, *self._distinct(forward_pass.upcoming, self._prefetch)]
        self._free_delayed(keep=window)
        self._gather(unit)
        for ahead in window[1:]:
            self._gather(ahead, Reservation.PREFETCH)
        self._wait(unit)
        self._emit(EventKind.FORWARD, unit)
        return call, self._flush()

    def exit(self, call: Call, outcome: Outcome) -> list[Event]:
        """End a unit's forward; `enter` returned ``call``."""
        while self._stack.pop() is not call:  # above it: calls whose `enter` raised
            pass
        self.tick += 1
        call.exited, call.outcome = self.tick, outcome
        if call.forward_pass.grad and not call.forward_pass.recomputed:
            self._status[call.unit].calls_left += 1  # even if detached: it may be recomputed
        if not self._stays_after_forward(call):
            self._free_delayed()
            if call.is_differentiable:
                self._to_free = call.unit
            else:
                self._free(call.unit)
        if not self._stack or self._stack[-1].forward_pass is not call.forward_pass:
            self._end_pass(call.forward_pass, failed=outcome is Outcome.FAILED)
        return self._flush()

    # -- backward --------------------------------------------------------------------------------

    def begin_backward(self, task: int) -> None:
        """Begin autograd's graph task ``task``, which runs until `finish_backward`."""
        self._backwards.setdefault(task, {})

    def before_backward(
        self, call: Call, task: int, *, reduces: bool = True, is_recorded: bool = False
    ) -> list[Event]:
        """Gradients have reached the output of an unfinished ``call``, in graph task ``task``.

        It ``reduces`` if parameters receive gradients. It ``is_recorded`` if autograd records this
        backward, for another backward through it.
        """
        backwards = self._backwards.setdefault(task, {})
        if call.forward_pass not in backwards:
            backwards[call.forward_pass] = BackwardPass(call.forward_pass, reduces=reduces)
        call.forward_pass.has_recorded_backward |= is_recorded
        backward = backwards[call.forward_pass]
        window = self._window(backward.upcoming)
        for forward_pass, other in backwards.items():
            if forward_pass.calls[0].entered > call.exited and not other.keeps:
                # Before any visit, so that ranks agree even if they reached different calls.
                self._complete(other, keep=window)
        for visited in backward.visit_until(None if backward.keeps else call):
            self._visit(backward, visited)
        return self._flush()

    def reduces(self, task: int) -> bool:
        """Whether graph task ``task`` gives gradients to parameters. True if it reached no call."""
        return all(backward.reduces for backward in self._backwards.get(task, {}).values())

    def finish_backward(self, task: int) -> list[Event]:
        """Autograd has run the last node of graph task ``task``."""
        reduces = self.reduces(task)
        for backward in self._backwards.get(task, {}).values():
            self._complete(backward)
        self._backwards.pop(task, None)
        if self._backwards:  # an outer backward continues, and needs memory for its own reductions
            self._finish_reduces(1)
            return self._flush()
        if not reduces:
            self._free_all()
            return self._flush()
        for unit, status in enumerate(self._status):
            if status.awaits_reduction and self._settings[unit].reduces_fully:
                self._reduce(unit)
        self._finish_reduces(0)
        while self._arriving:
            self._step(self._arriving.popleft())
        for unit, status in enumerate(self._status):
            if status.awaits_step:
                self._step(unit)
            if not self.steps_in_backward:
                status.calls_left = 0
        self._is_accumulating = not all(one.reduces_fully for one in self._settings)
        self._free_all()
        return self._flush()

    def commit(self) -> None:
        """The events of `finish_backward` were performed: `abandon` cannot undo them any more."""
        for status in self._status:
            status.awaited_before = status.awaits_reduction
        self._finished, self.finished_again = set(), None

    def abandon(self, depth: int = 0) -> list[Event]:
        """Drop the state of a pass that failed; reductions in flight count as finished.

        Gradients of earlier backwards still await their reduction. ``depth`` calls go on.
        """
        del self._stack[depth:]
        self._events = []  # an interrupt may have left some
        # Only some ranks may have recorded the order of this pass, so all ranks forget it.
        self._expected.clear()
        self._backwards.clear()
        self._reducing.clear()
        self._arriving.clear()
        self._finished, self.finished_again = set(), None
        for status in self._status:
            status.awaits_reduction = status.awaited_before
            status.awaits_step = False
            status.calls_left = 0
        return self.release_all()

    # -- requests of the user --------------------------------------------------------------------

    def request(self, kind: EventKind, units: Iterable[int]) -> list[Event]:
        """Gather, wait for or free units outside the schedule; units in use are not freed."""
        for unit in units:
            match kind:
                case EventKind.GATHER:
                    in_pass = bool(self._stack)
                    self._gather(unit, Reservation.PREFETCH if in_pass else Reservation.REQUEST)
                case EventKind.WAIT:
                    self._wait(unit)
                case EventKind.FREE:
                    self._free(unit)
        return self._flush()

    def release_all(self) -> list[Event]:
        """Free everything but shards, even if a later backward will need it again."""
        self._is_accumulating = False
        self._free_all(even_kept=True)
        return self._flush()

    def is_settled(self, depth: int) -> bool:
        """Whether ``depth`` calls run, and all events were returned."""
        return len(self._stack) == depth and not self._events

    def state(self, unit: int) -> UnitState:
        return self._status[unit].state

    def is_usable(self, unit: int) -> bool:
        """Whether compute can use the parameters: they are gathered, or need no gather."""
        is_gathered = self._status[unit].state is UnitState.GATHERED
        return is_gathered or not self._units[unit].gathered_bytes

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait for a reduction."""
        return any(self.awaiting_reduction)

    @property
    def awaiting_reduction(self) -> tuple[bool, ...]:
        """By unit, whether gradients of earlier backwards wait for a reduction."""
        return tuple(status.awaits_reduction for status in self._status)

    @awaiting_reduction.setter
    def awaiting_reduction(self, values: Iterable[bool]) -> None:
        for status, value in zip(self._status, values, strict=True):
            status.awaits_reduction = status.awaited_before = value

    def stays_for_next_pass(self, unit: int) -> bool:
        """Whether the unit stays gathered for the next forward: no optimizer steps before it."""
        is_kept = self._status[unit].reservation is Reservation.MICRO_BATCH
        return is_kept or self._stays_after_backward(unit)

    def is_in_backward(self, task: int) -> bool:
        """Whether autograd's graph task ``task`` has reached a call."""
        return bool(self._backwards.get(task))

    def is_in_use(self, unit: int) -> bool:
        """Whether a forward or backward of ``unit`` is running."""
        return any(call.unit == unit for call in self._stack) or any(
            backward.is_active(unit) for backward in self._all_backwards()
        )

    # -- passes and calls ------------------------------------------------------------------------

    def _pass(self, unit: int, *, grad: bool, recomputed: bool) -> Pass:
        if self._stack and self._stack[-1].forward_pass.recomputed == recomputed:
            return self._stack[-1].forward_pass
        if recomputed:
            return Pass(recomputed, grad, expected=(), on_track=False)
        # An optimizer may have stepped, so gathered units are stale unless they were requested.
        self._free_all(keep_reserved=True)
        return Pass(recomputed, grad, self._expected.get((unit, grad), ()))

    def _end_pass(self, forward_pass: Pass, *, failed: bool) -> None:
        self._free_prefetched()
        if forward_pass.recomputed:
            return
        if failed or not forward_pass.is_differentiable:
            self._free_all()
        if not failed:
            order = tuple(call.unit for call in forward_pass.calls)
            self._expected[order[0], forward_pass.grad] = order

    def _stays_after_forward(self, call: Call) -> bool:
        if self.is_in_use(call.unit) or self._is_prefetched_by_backward(call.unit):
            return True
        calls = call.forward_pass.by_unit[call.unit]
        if any(other.outcome is Outcome.UNHOOKED for other in calls):
            return True  # nothing would gather it before its backward
        chosen = self._settings[call.unit].reshard_after_forward
        if self._units[call.unit].reshard if chosen is None else chosen:
            return False
        return self.stays_for_next_pass(call.unit) or any(c.is_differentiable for c in calls)

    def _stays_after_backward(self, unit: int) -> bool:
        settings = self._settings[unit]
        return not (settings.reshard_after_backward or settings.reduces_fully)

    def _visit(self, backward: BackwardPass, call: Call) -> None:
        window = self._window(chain((call.unit,), backward.upcoming))
        self._free_delayed(keep=window)
        if not backward.keeps:
            for finished in backward.finish_younger(than=call.exited):
                self._finish(backward, finished, keep=window)
        for unit in window:
            self._gather(unit)
        self._finish_reduces(1, of=call.unit)
        self._wait(call.unit)
        self._emit(EventKind.BACKWARD, call.unit)

    def _complete(self, backward: BackwardPass, keep: Collection[int] = ()) -> None:
        """Visit the remaining calls and finish all of them."""
        for call in backward.visit_until(None):
            self._visit(backward, call)
        for call in backward.finish_younger(than=-1):
            self._finish(backward, call, keep)

    def _finish(self, backward: BackwardPass, call: Call, keep: Collection[int]) -> None:
        """Free the unit unless it is in ``keep``; after its last call, reduce its gradients."""
        unit, is_last = call.unit, backward.is_finished(call.unit)
        if self._stays_after_backward(unit):
            self._status[unit].reservation = Reservation.MICRO_BATCH
        elif unit not in keep:
            # Another backward follows before an optimizer changes the parameters.
            reduces_fully = self._settings[unit].reduces_fully
            accumulates = self._units[unit].two_level_gather and not reduces_fully
            self._free(unit, to_subgroup=not is_last or accumulates)
        if self._units[unit].is_trainable and is_last and backward.reduces:
            self._status[unit].calls_left -= backward.num_calls[unit]
            if unit in self._finished:
                self.finished_again = unit
            self._finished.add(unit)
            if self._settings[unit].reduce_grads:
                self._reduce(unit)
            else:
                self._status[unit].awaits_reduction = True

    # -- reductions ------------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        is_root = unit == 0 and self._units[unit].has_child_units
        self._finish_reduces(0 if is_root else 1, of=unit)
        self._emit(EventKind.REDUCE, unit)
        self._reducing.append(unit)
        self._status[unit].awaits_reduction = not self._settings[unit].all_reduce_grads
        while len(self._arriving) > 1:
            self._step(self._arriving.popleft())

    def _finish_reduces(self, left: int, of: int | None = None) -> None:
        """Finish the oldest reductions until at most ``left`` run, none of them of the unit ``of``.

        Another pass may still reduce the gradients of ``of``, whose buffer is needed now.
        """
        while len(self._reducing) > left or of in self._reducing:
            unit = self._reducing.popleft()
            self._emit(EventKind.FINISH_REDUCE, unit)
            status = self._status[unit]
            if self.steps_in_backward and not status.awaits_reduction:
                status.awaits_step = True
                if self._backwards and status.calls_left:
                    continue
                if not self._units[unit].offloads_gradients:
                    self._step(unit)
                elif unit not in self._arriving:
                    self._arriving.append(unit)

    def _step(self, unit: int) -> None:
        self._status[unit].awaits_step = False
        self._status[unit].calls_left = 0
        self._emit(EventKind.STEP, unit)

    # -- what to gather --------------------------------------------------------------------------

    def _window(self, units: Iterable[int]) -> list[int]:
        """The first of ``units``, in backward order, and the units to gather while it computes."""
        following = iter(units)
        first = next(following, None)
        if first is None:
            return []
        # Even with prefetch=0, the first unit inside an enclosing one is gathered during the
        # latter's backward, since there is memory for it.
        ahead = max(self._prefetch, int(self._units[first].has_child_units))
        return [first, *self._distinct(following, ahead)]

    def _distinct(self, upcoming: Iterable[int], count: int) -> list[int]:
        """The next ``count`` different units to gather: with parameters, and not being called."""
        chosen: list[int] = []
        if not self._gathers:
            return chosen
        in_use = {call.unit for call in self._stack}
        for unit in upcoming:  # no further than needed: there may be hundreds
            if len(chosen) == count:
                break
            if unit not in in_use and unit not in chosen and self._units[unit].gathered_bytes:
                chosen.append(unit)
        return chosen

    def _is_prefetched_by_backward(self, unit: int) -> bool:
        return any(
            unit in self._distinct(backward.upcoming, self._prefetch)
            for backward in self._all_backwards()
        )

    def _all_backwards(self) -> Iterator[BackwardPass]:
        return chain.from_iterable(each.values() for each in self._backwards.values())

    # -- residency -------------------------------------------------------------------------------

    def _gather(self, unit: int, reservation: Reservation | None = None) -> None:
        status = self._status[unit]
        if status.state is not UnitState.SHARDED or not self._units[unit].gathered_bytes:
            return
        if self._units[unit].two_level_gather:
            self._reshard_to_subgroup(unit)
        self._move(EventKind.GATHER, unit)
        status.reservation = reservation

    def _wait(self, unit: int) -> None:
        if self._status[unit].state is UnitState.GATHERING:
            self._move(EventKind.WAIT, unit)

    def _free(self, unit: int, *, to_subgroup: bool = False) -> None:
        """Free a gathered unit; with ``to_subgroup``, keep its shard within a subgroup."""
        status = self._status[unit]
        if status.state is UnitState.SHARDED or self.is_in_use(unit):
            return
        if to_subgroup and self._units[unit].subgroup:
            self._reshard_to_subgroup(unit)
        self._move(EventKind.FREE, unit)
        status.reservation = None
        if not to_subgroup:
            self._free_subgroup(unit)

    def _reshard_to_subgroup(self, unit: int) -> None:
        if not self._status[unit].has_subgroup_shard:
            self._status[unit].has_subgroup_shard = True
            self._emit(EventKind.RESHARD_TO_SUBGROUP, unit)

    def _free_subgroup(self, unit: int) -> None:
        if not self._status[unit].has_subgroup_shard:
            return
        outlives = self._units[unit].two_level_gather and self._is_accumulating
        if self.steps_in_backward and self._settings[unit].reduces_fully:
            outlives = False  # this unit has stepped, even if others accumulate
        if not outlives and not self.is_in_use(unit):
            self._status[unit].has_subgroup_shard = False
            self._emit(EventKind.FREE_SUBGROUP, unit)

    def _free_prefetched(self) -> None:
        for unit, status in enumerate(self._status):
            if status.reservation is Reservation.PREFETCH:
                self._free(unit, to_subgroup=self._units[unit].two_level_gather)

    def _free_all(self, *, keep_reserved: bool = False, even_kept: bool = False) -> None:
        """Free all units but those that stay gathered between steps (``even_kept``: those, too).

        With ``keep_reserved``, a pass begins: units that are reserved for it stay gathered, and
        their reservation ends.
        """
        self._to_free = None
        for unit, status in enumerate(self._status):
            if keep_reserved and status.reservation in _FOR_THE_NEXT_PASS:
                status.reservation = None
            elif even_kept or not self._stays_after_backward(unit):
                self._free(unit)
                self._free_subgroup(unit)

    def _free_delayed(self, keep: Collection[int] = ()) -> None:
        if self._to_free is not None and self._to_free not in keep:
            self._free(self._to_free, to_subgroup=True)
        self._to_free = None

    def _move(self, kind: EventKind, unit: int) -> None:
        status = self._status[unit]
        status.state = _TRANSITIONS[status.state, kind]
        self._emit(kind, unit)

    def _emit(self, kind: EventKind, unit: int) -> None:
        num_bytes = _BYTES[kind](self._units[unit]) if kind in _BYTES else 0
        self._events.append(Event(kind, unit, num_bytes))

    def _flush(self) -> list[Event]:
        events, self._events = self._events, []
        return events
