"""Calls of units: in the order of a forward, and in the order in which a backward visits them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

__all__ = ["BackwardPass", "Call", "Outcome", "Pass"]


class Outcome(Enum):
    """How a unit's forward ended."""

    DIFFERENTIABLE = auto()  # backward may reach its output
    UNHOOKED = auto()  # backward may reach a tensor other than its output
    DETACHED = auto()  # backward cannot reach it
    FAILED = auto()  # it raised


@dataclass(eq=False, slots=True)
class Pass:
    """One outermost forward, or one recomputation inside backward."""

    recomputed: bool
    grad: bool
    expected: tuple[int, ...]  # units in the order in which the last such pass entered them
    calls: list["Call"] = field(default_factory=list)
    by_unit: defaultdict[int, list["Call"]] = field(default_factory=lambda: defaultdict(list))
    has_recorded_backward: bool = False  # autograd may go backward through it
    on_track: bool = True  # all units so far were entered in the expected order

    def append(self, call: "Call") -> None:
        position = len(self.calls)
        is_expected = position < len(self.expected) and self.expected[position] == call.unit
        self.on_track = self.on_track and is_expected
        self.calls.append(call)
        self.by_unit[call.unit].append(call)

    @property
    def upcoming(self) -> Iterable[int]:
        return islice(self.expected, len(self.calls), None) if self.on_track else ()

    @property
    def is_differentiable(self) -> bool:
        return any(call.is_differentiable for call in self.calls)


@dataclass(eq=False, slots=True)
class Call:
    """One run of a unit's forward."""

    unit: int  # index in the plan
    forward_pass: Pass
    entered: int  # tick
    exited: int = -1
    outcome: Outcome = Outcome.DETACHED

    @property
    def is_differentiable(self) -> bool:
        return self.outcome in (Outcome.DIFFERENTIABLE, Outcome.UNHOOKED)


class BackwardPass:
    """One backward through the calls of one pass.

    It ``reduces`` unless no parameter receives a gradient. It ``keeps`` all units until its end if
    autograd may visit calls several times.
    """

    def __init__(self, forward: Pass, *, reduces: bool = True) -> None:
        self.reduces = reduces
        self.keeps = forward.has_recorded_backward
        calls = [call for call in forward.calls if call.is_differentiable]
        self._unvisited = dict.fromkeys(sorted(calls, key=lambda call: call.exited))  # last first
        self._active: dict[Call, None] = {}  # visited and not finished
        self.num_calls = Counter(call.unit for call in calls)
        self._num_unfinished = self.num_calls.copy()

    @property
    def upcoming(self) -> Iterator[int]:
        return (call.unit for call in reversed(self._unvisited))

    def is_active(self, unit: int) -> bool:
        return any(call.unit == unit for call in self._active)

    def is_finished(self, unit: int) -> bool:
        """Whether all calls of ``unit`` are finished."""
        return not self._num_unfinished[unit]

    def visit_until(self, last: Call | None) -> Iterator[Call]:
        """Visit the calls up to ``last``, or all calls for None, and yield each."""
        while self._unvisited and (last is None or last in self._unvisited):
            call, _ = self._unvisited.popitem()
            self._active[call] = None
            yield call

    def finish_younger(self, than: int) -> Iterator[Call]:
        """Finish the active calls that began after tick ``than``, youngest first; yield each."""
        younger = [call for call in self._active if call.entered > than]
        for call in sorted(younger, key=lambda call: -call.entered):
            del self._active[call]
            self._num_unfinished[call.unit] -= 1
            yield call
