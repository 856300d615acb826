"""Random programs on random units, and a monitor that checks their events against the laws."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from shardwise.plan.layout import ParameterSpec, lay_out
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import PRESETS
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import Event, EventKind, describe
from shardwise.schedule.sequencer import Call, Outcome, Sequencer

__all__ = [
    "Backward",
    "CallSpec",
    "Driver",
    "Forward",
    "Monitor",
    "Recompute",
    "call_specs",
    "make_units",
    "plans",
    "programs",
]

COLLECTIVES = (EventKind.GATHER, EventKind.REDUCE, EventKind.FINISH_REDUCE)


# -- plans -------------------------------------------------------------------------------------


def make_units(
    parents: Sequence[int | None], kinds: Sequence[str], reshard: Sequence[bool]
) -> tuple[UnitPlan, ...]:
    """Units u0, u1, ... with 16 elements each; kinds are "trainable", "frozen" and "empty"."""
    units = []
    for i, (parent, kind, is_resharded) in enumerate(zip(parents, kinds, reshard, strict=True)):
        spec = ParameterSpec((f"u{i}.weight",), (16,), "float32", 4, trainable=kind == "trainable")
        parameters = () if kind == "empty" else (spec,)
        unit = UnitPlan(
            name=f"u{i}" if i else "",
            label=f"u{i}",
            parameters=parameters,
            layouts=(lay_out(parameters, 2),) if parameters else (),
            parent=parent,
            has_child_units=i in parents,
            options=UnitOptions(is_resharded, world_size=2),
        )
        units.append(unit)
    return tuple(units)


@st.composite
def plans(draw: st.DrawFn, *, reshard_all: bool = False, max_units: int = 6) -> Plan:
    count = draw(st.integers(1, max_units))
    parents = [None, *(draw(st.integers(0, i - 1)) for i in range(1, count))]
    kind = st.sampled_from(["trainable", "trainable", "trainable", "frozen", "empty"])
    kinds = [draw(kind) for _ in range(count)]
    reshard = [draw(st.booleans()) or (reshard_all and i > 0) for i in range(count)]
    return Plan(
        make_units(parents, kinds, reshard), PRESETS["fsdp"], 2, prefetch=draw(st.integers(0, 3))
    )


# -- programs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallSpec:
    """A unit's call: what it calls, how it ends, and whether it catches a failure inside."""

    unit: int
    outcome: Outcome = Outcome.DIFFERENTIABLE
    inner: tuple["CallSpec", ...] = ()
    catches: bool = False
    returns_inner: bool = False  # its output is what its last inner call returned


@dataclass(frozen=True)
class Recompute:
    """A recomputation by activation checkpointing, when backward has reached a call."""

    reentrant: bool
    region: str  # "self", "inner" or "siblings" of the call that is reached
    stop_after: int | None  # calls after which the recomputation stops early


@dataclass(frozen=True)
class Forward:
    call: CallSpec
    grad: bool = True


@dataclass(frozen=True)
class Backward:
    """One graph task through some passes."""

    passes: tuple[int, ...] = (0,)  # counted back from the last that has not been walked
    missing: int = 0  # bit i: the i-th call is not reached; the last of each pass always is
    recomputes: tuple[Recompute | None, ...] = ()  # for the i-th arrival
    dies_after: int | None = None  # arrivals
    retain: bool = False  # the same passes may be walked again


Program = tuple[Forward | Backward, ...]

DIFFERENTIABLE_OR_NOT = (Outcome.DIFFERENTIABLE, Outcome.DIFFERENTIABLE, Outcome.DETACHED)
ANY_OUTCOME = (*DIFFERENTIABLE_OR_NOT, Outcome.DIFFERENTIABLE, Outcome.UNHOOKED, Outcome.FAILED)


def descendants(plan: Plan, unit: int) -> list[int]:
    inside: list[int] = []
    for i, other in enumerate(plan.units):
        if other.parent == unit or other.parent in inside:
            inside.append(i)
    return inside


@st.composite
def call_specs(
    draw: st.DrawFn,
    plan: Plan,
    outcomes: Sequence[Outcome] = ANY_OUTCOME,
    unit: int | None = None,
    max_inner: int = 4,
) -> CallSpec:
    """A call of ``unit`` (or of any; the root most often) and of units inside it."""
    if unit is None:
        unit = draw(st.sampled_from([0, 0, *range(len(plan.units))]))
    inside = descendants(plan, unit)
    inner: list[CallSpec] = []
    if inside:
        for other in draw(st.lists(st.sampled_from(inside), max_size=max_inner)):
            inner.append(draw(call_specs(plan, outcomes, other, max_inner=2)))  # noqa: PERF401
    return CallSpec(
        unit,
        draw(st.sampled_from(outcomes)),
        tuple(inner),
        catches=draw(st.booleans()),
        returns_inner=draw(st.booleans()),
    )


RECOMPUTES = st.builds(
    Recompute,
    reentrant=st.booleans(),
    region=st.sampled_from(["self", "inner", "siblings"]),
    stop_after=st.none() | st.integers(1, 4),
)


@st.composite
def programs(
    draw: st.DrawFn,
    plan: Plan,
    *,
    outcomes: Sequence[Outcome] = ANY_OUTCOME,
    recomputes: st.SearchStrategy[Recompute] | None = RECOMPUTES,
    may_die: bool = False,
) -> Program:
    """One to three rounds of some forwards followed by some backwards."""
    recompute = st.none() if recomputes is None else st.none() | recomputes | recomputes
    forward = st.builds(
        Forward, call_specs(plan, outcomes), grad=st.sampled_from([True, True, True, False])
    )
    backward = st.builds(
        Backward,
        passes=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
        missing=st.just(0) | st.integers(0, 255),
        recomputes=st.lists(recompute, max_size=4).map(tuple),
        dies_after=st.none() | st.integers(1, 3) if may_die else st.none(),
        retain=st.sampled_from([False, False, True]),
    )
    program: list[Forward | Backward] = []
    for _ in range(draw(st.integers(1, 3))):
        program += draw(st.lists(forward, min_size=1, max_size=3))
        program += draw(st.lists(backward, min_size=1, max_size=2))
    return tuple(program)


# -- the laws ----------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """The state in which a unit's forward or backward begins."""

    event: Event
    gathered: frozenset[str]


@dataclass
class Monitor:
    """What the engine would hold, and the laws that every event must obey."""

    plan: Plan
    events: list[Event] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    waited: set[str] = field(default_factory=set)
    reducing: deque[str] = field(default_factory=deque)
    check_bound: bool = False

    def __post_init__(self) -> None:
        self.units = self.plan.units
        self.labels = [unit.label for unit in self.units]

    def perform(self, events: list[Event], busy: Iterable[int]) -> None:
        """Apply ``events``, while the units of ``busy`` compute."""
        in_use = {self.plan.units[unit].label for unit in busy}
        for position, event in enumerate(events):
            getattr(self, f"_{event.kind.value}")(self.units[event.unit], event, in_use)
            self.events.append(event)
            if event.kind is EventKind.GATHER and self.check_bound:
                self._check_bound(events[position:])

    def check_ready(self, busy: Iterable[int]) -> None:
        for unit in busy:
            assert self._is_ready(self.plan.units[unit]), f"u{unit} computes but is not gathered"

    def _gather(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        assert event.bytes == unit.gathered_bytes > 0
        assert unit.label not in self.gathered, f"{event}: gathered already"
        self.gathered.add(unit.label)

    def _wait(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        assert unit.label in self.gathered, f"{event}: not gathered"
        assert unit.label not in self.waited, f"{event}: waited for already"
        self.waited.add(unit.label)

    def _forward(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        assert self._is_ready(unit), f"{event}: not ready"
        self.snapshots.append(Snapshot(event, frozenset(self.gathered)))

    def _backward(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        self._forward(unit, event, _)
        assert len(self.reducing) <= 1, f"{event}: room for its gradients is not free"
        assert unit.label not in self.reducing, f"{event}: its last reduction is under way"

    def _free(self, unit: UnitPlan, event: Event, in_use: set[str]) -> None:
        assert event.bytes == unit.gathered_bytes
        assert unit.label in self.gathered, f"{event}: not gathered"
        assert unit.label not in in_use, f"{event}: in use"
        self.gathered.discard(unit.label)
        self.waited.discard(unit.label)

    def _reduce(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        assert unit.is_trainable
        assert event.bytes == unit.gradient_bytes
        assert len(self.reducing) < 2, f"{event}: two are outstanding"
        assert unit.label not in self.reducing, f"{event}: its last reduction is under way"
        self.reducing.append(unit.label)

    def _finish_reduce(self, unit: UnitPlan, event: Event, _: set[str]) -> None:
        assert event.bytes == unit.gradient_shard_bytes
        assert self.reducing.popleft() == unit.label, f"{event}: not the oldest"

    def _is_ready(self, unit: UnitPlan) -> bool:
        return not unit.gathered_bytes or unit.label in self.waited

    def _check_bound(self, following: list[Event]) -> None:
        """At most 1 + prefetch units are gathered besides those around the unit that computes."""
        computes = (EventKind.FORWARD, EventKind.BACKWARD)
        current = next(event for event in following if event.kind in computes)
        unit = self.units[current.unit]
        room = 1 + self.plan.prefetch
        if current.kind is EventKind.BACKWARD and unit.has_child_units:
            room = max(room, 2)  # the first unit inside it is gathered as well
        around = set(self._around(unit))
        assert len(self.gathered - around) <= room, f"{sorted(self.gathered)} at {current}"

    def _around(self, unit: UnitPlan) -> Iterator[str]:
        yield self.plan.units[0].label
        while unit.parent is not None:
            unit = self.plan.units[unit.parent]
            yield unit.label

    @property
    def collectives(self) -> list[str]:
        return [describe(e, self.labels) for e in self.events if e.kind in COLLECTIVES]


# -- running them ------------------------------------------------------------------------------


class Failed(Exception):  # noqa: N818
    """A forward raised, or a recomputation stopped early."""


@dataclass(eq=False)
class Ran:
    """A call that was made, with the calls around and inside it."""

    spec: CallSpec
    call: Call
    around: "Ran | None"
    inner: list["Ran"] = field(default_factory=list)

    @property
    def order(self) -> float:
        """The position in autograd's order, which is that of the age of outputs."""
        last = self.inner[-1] if self.inner else None
        if self.spec.returns_inner and last is not None and last.call.is_differentiable:
            return last.order - 1e-6
        return self.call.exited

    def everything(self) -> Iterator["Ran"]:
        for ran in self.inner:
            yield from ran.everything()
        yield self

    def enclosing(self) -> Iterator["Ran"]:
        if self.around is not None:
            yield self.around
            yield from self.around.enclosing()


class Driver:
    """Runs programs as hooks and autograd would, and tracks the calls that are running."""

    def __init__(self, plan: Plan, *, check_bound: bool = False) -> None:
        self.plan = plan
        self.sequencer = Sequencer(plan)
        self.monitor = Monitor(plan, check_bound=check_bound)
        self.pending: list[Ran] = []  # passes that may be walked
        self.stack: list[Ran] = []
        self.walking: dict[int, list[Ran]] = {}  # calls whose backward is under way, by task
        self.num_tasks = 0
        self.reduced: list[Counter[str]] = []  # of the graph tasks under way, innermost last

    def run(self, program: Program) -> None:
        for op in program:
            if isinstance(op, Forward):
                self.forward(op)
            else:
                self.backward(op)

    # -- forward

    def forward(self, op: Forward) -> Ran | None:
        """One pass; None if it failed."""
        assert not self.walking
        ran: list[Ran] = []
        try:
            self._call(op.call, ran, grad=op.grad)
        except Failed:
            assert not self.monitor.gathered, "a failed pass leaves nothing behind"
            return None
        if op.grad:
            self.pending.insert(0, ran[0])
        if not any(call.is_differentiable for call in ran[0].call.forward_pass.calls):
            assert not self.monitor.gathered, "no backward will come"
        return ran[0]

    def _call(
        self,
        spec: CallSpec,
        into: list[Ran],
        *,
        grad: bool,
        recompute: list[int] | None = None,
    ) -> None:
        """Call a unit; ``recompute`` counts down the calls until the recomputation stops."""
        recomputed = recompute is not None
        call, events = self.sequencer.enter(spec.unit, grad=grad, recomputed=recomputed)
        ran = Ran(spec, call, self.stack[-1] if self.stack else None)
        self._perform(events, ran)
        if not recomputed and not self.stack:
            gathered = {self.plan.units[e.unit].label for e in events if e.kind is EventKind.GATHER}
            assert self.monitor.gathered == gathered, "stale since the optimizer's last step"
        else:
            check_thrift(events)
        self.stack.append(ran)
        try:
            self._compute(ran, grad=grad, recompute=recompute)
        except Failed:
            self._exit(ran, Outcome.FAILED)
            raise
        outcome = Outcome.DIFFERENTIABLE if recomputed else spec.outcome
        self._exit(ran, outcome if grad else Outcome.DETACHED)
        into.append(ran)

    def _compute(self, ran: Ran, *, grad: bool, recompute: list[int] | None) -> None:
        if recompute is not None:
            recompute[0] -= 1
            if not recompute[0]:
                raise Failed
        for inner in ran.spec.inner:
            try:
                self._call(inner, ran.inner, grad=grad, recompute=recompute)
            except Failed:
                if not ran.spec.catches or recompute == [0]:
                    raise
        if ran.spec.outcome is Outcome.FAILED:
            raise Failed

    def _exit(self, ran: Ran, outcome: Outcome) -> None:
        assert self.stack.pop() is ran
        self._perform(self.sequencer.exit(ran.call, outcome))

    # -- backward

    def backward(self, op: Backward) -> None:
        """One graph task through the passes that ``op`` names, if gradients reach them."""
        chosen = [self.pending[i] for i in op.passes if i < len(self.pending)]
        arrivals = [ran for top in chosen for ran in reached(top, op.missing)]
        if not arrivals:
            return
        self._walk(arrivals, op)
        if not op.retain:
            self.pending = [top for top in self.pending if top not in chosen]
        assert not self.walking
        assert not self.monitor.gathered, "something is left gathered"
        assert not self.monitor.reducing, "a reduction is left"

    def _walk(self, arrivals: list[Ran], op: Backward) -> None:
        self.num_tasks += 1
        task = self.num_tasks
        self.walking[task] = []
        self.reduced.append(Counter())
        for i, ran in enumerate(sorted(arrivals, key=lambda ran: -ran.order)):
            self._reach(ran, task)
            recompute = op.recomputes[i] if i < len(op.recomputes) else None
            if recompute is not None:
                self._recompute(ran, recompute, op.recomputes[i + 1 :])
            if op.dies_after == i + 1:
                self._die()
                return
        del self.walking[task]
        self._perform(self.sequencer.finish_backward(task))
        assert self.reduced.pop() == self._expected_reductions(arrivals)

    def _reach(self, ran: Ran, task: int) -> None:
        """Run the node of the call's output, as autograd would: no younger node is left."""
        under_way = [
            other for other in self.walking[task] if not other.call.entered > ran.call.exited
        ]
        around = [other for other in ran.enclosing() if other.call.is_differentiable]
        self.walking[task] = under_way
        events = self.sequencer.before_backward(ran.call, task)
        self._perform(events, ran, *around)
        check_thrift(events)
        self.walking[task] = [*under_way, ran, *around]

    def _recompute(
        self, ran: Ran, recompute: Recompute, nested: tuple[Recompute | None, ...]
    ) -> None:
        """Run a checkpointed region again and, if it is reentrant, its own backward."""
        countdown = [-1 if recompute.stop_after is None else recompute.stop_after]
        again: list[Ran] = []
        try:
            for spec in region(ran, recompute):
                self._call(spec, again, grad=True, recompute=countdown)
        except Failed:
            return
        arrivals = [each for top in again for each in reached(top, 0)]
        if recompute.reentrant and arrivals:
            self._walk(arrivals, Backward(recomputes=nested))

    def _die(self) -> None:
        self.walking.clear()
        self.reduced.clear()
        self.monitor.reducing.clear()  # reductions in flight count as finished
        self._perform(self.sequencer.abandon())
        assert not self.monitor.gathered, "something is left gathered"

    def _expected_reductions(self, arrivals: list[Ran]) -> Counter[str]:
        """Every trainable unit with a differentiable call, once for each pass that is walked."""
        expected = Counter[str]()
        for of in dict.fromkeys(ran.call.forward_pass for ran in arrivals):
            units = {self.plan.units[call.unit] for call in of.calls if call.is_differentiable}
            expected.update(unit.label for unit in units if unit.is_trainable)
        return expected

    def _perform(self, events: list[Event], *beginning: Ran) -> None:
        """Check ``events`` with the monitor; after them, ``beginning`` compute too."""
        under_way = [*self.stack, *(ran for walk in self.walking.values() for ran in walk)]
        self.monitor.perform(events, {ran.call.unit for ran in under_way})
        self.monitor.check_ready({ran.call.unit for ran in (*under_way, *beginning)})
        if self.reduced:
            reduced = [e.unit for e in events if e.kind is EventKind.REDUCE]
            self.reduced[-1].update(self.plan.units[unit].label for unit in reduced)
        if self.walking:
            assert len(self.monitor.reducing) <= 1, "backward continues without room for gradients"


def reached(top: Ran, missing: int) -> list[Ran]:
    """The calls that a gradient reaches: the last of the pass, and others not in ``missing``."""
    calls = [ran for ran in top.everything() if ran.call.is_differentiable]
    calls.sort(key=lambda ran: -ran.call.exited)
    return [ran for i, ran in enumerate(calls) if i == 0 or not missing >> i & 1]


def region(ran: Ran, recompute: Recompute) -> list[CallSpec]:
    """The calls of a checkpointed region; backward had not reached those of a reentrant one."""
    if recompute.region == "self":
        chosen = [] if recompute.reentrant else [ran]
    elif recompute.region == "inner":
        chosen = ran.inner
    else:
        siblings = ran.around.inner if ran.around is not None else [ran]
        chosen = siblings[: siblings.index(ran) + 1]
    if recompute.reentrant:
        chosen = [each for each in chosen if each.call.outcome is Outcome.DETACHED]
    return [each.spec for each in chosen]


def check_thrift(events: Iterable[Event]) -> None:
    """Check that no unit is freed and gathered again before another unit computes."""
    freed: set[int] = set()
    for event in events:
        if event.kind is EventKind.FREE:
            freed.add(event.unit)
        elif event.kind is EventKind.GATHER:
            assert event.unit not in freed, f"{event}: it was there"
        elif event.kind in (EventKind.FORWARD, EventKind.BACKWARD):
            freed.clear()
