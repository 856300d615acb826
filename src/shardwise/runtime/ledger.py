"""The ledger: the events of the last steps, with the time each took."""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from shardwise.comm.api import Work
from shardwise.comm.device import NO_TIME
from shardwise.errors import StepError
from shardwise.plan.axes import NOTHING, AxisBytes
from shardwise.schedule.events import GATHERS, Event, EventKind, describe
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["Ledger", "LedgerReader", "Record", "count_sent", "is_timed"]

# Records of forwards that have had no backward: more than those of 32 passes of 100 layers.
_MAX_RECORDS = 1 << 14


# Weak on both sides: a reader of a ledger may hold parameters, which hold their mesh.
_ledgers: "weakref.WeakKeyDictionary[DataParallelMesh, weakref.ref[Ledger]]" = (
    weakref.WeakKeyDictionary()
)


def count_sent(mesh: DataParallelMesh | None, work: Work, *, after_backward: bool = False) -> None:
    """Count a collective that no event launched in the ledger of the model on ``mesh``.

    Nothing is counted if no model on it has a ledger. With ``after_backward``, it belongs to the
    step whose backward ended last.
    """
    reference = None if mesh is None else _ledgers.get(mesh)
    ledger = None if reference is None else reference()
    if ledger is not None and mesh is not None:
        ledger.add_sent(mesh.axis_bytes([work]), after_backward=after_backward)


@dataclass(slots=True)
class Record:
    """One event that took place.

    Times are in seconds of `time.perf_counter`, on the stream that computes: floats, or device
    events that can be converted to floats once they have taken place. They are NaN if the forward
    was not timed (`Ledger.takes_times`).
    """

    event: Event
    step: int
    began: SupportsFloat
    ended: SupportsFloat = 0.0
    works: tuple[Work, ...] = ()  # communication that the event launched
    mesh: DataParallelMesh | None = None  # of its ranks; None if the works only copy
    inner_ranks: int = 1  # of a subgroup of the mesh row

    @property
    def sent(self) -> AxisBytes:
        """Bytes that this rank sends in the communication."""
        return NOTHING if self.mesh is None else self.mesh.axis_bytes(self.works, self.inner_ranks)

    @property
    def seconds(self) -> float:
        """Duration of the event; for a wait, this is exposed communication."""
        return float(self.ended) - float(self.began)

    @property
    def busy_seconds(self) -> float:
        """Duration of the communication that the event launched."""
        return sum(ended - began for began, ended in (work.span for work in self.works))


def is_timed(records: Iterable[Record]) -> bool:
    """Whether all ``records`` have times; on a device, the host does not wait for them."""
    return all(record.began is not NO_TIME for record in records)


class LedgerReader:
    """Is called when the ledger changes. The methods of this base class do nothing."""

    def wants_times(self, step: int) -> bool:  # noqa: ARG002
        """Whether this reader needs the times of the events of ``step``."""
        return False

    def forward_began(self) -> None:
        """An outermost forward is about to enter its first unit."""

    def forward_ended(self) -> None:
        """An outermost forward has ended."""

    def appended(self, record: Record) -> None:
        """An event of the current step took place, or was launched."""

    def step_ended(self, step: int, records: Sequence[Record]) -> None:
        """A backward has ended; a device may still be running it."""

    def step_abandoned(self) -> None:
        """The current step raised; the next attempt has the same number."""

    def span_ended(self, step: int, name: str, began: SupportsFloat, ended: SupportsFloat) -> None:
        """A `Ledger.span` has ended in ``step``, the current step."""


class Ledger:
    """The events of the last ``max_steps`` steps.

    A step is one forward and the backward that follows it, so with accumulation an optimizer step
    has several. A forward that no backward can follow, as under `torch.no_grad`, is part of the
    current step until the next forward begins.

    ``takes_times`` says whether all steps are timed. On an accelerator this costs host time for
    each event, so it is False there unless you set it; steps whose times a reader wants, such as
    those that `sw.record` records in detail, are timed anyway. On a CPU it is True.
    """

    def __init__(
        self,
        labels: Sequence[str],
        max_steps: int = 8,
        clock: Callable[[], SupportsFloat] = time.perf_counter,  # of the stream that computes
        takes_times: bool = True,
    ) -> None:
        self._labels = labels  # of the plan's units
        self.clock = clock
        self.takes_times = takes_times
        self.is_timed = takes_times  # whether the current forward and its backward are
        self.readers: list[LedgerReader] = []
        self.outer_bytes = 0  # of differences that this rank has sent to other replicas
        self.updates = 0  # number of forwards before which parameters had changed
        self.step = 0  # number of the current step
        self.gathered_bytes = 0  # of the units that are gathered now
        self._steps: deque[list[Record]] = deque([[]], maxlen=max_steps)
        self._sent = deque([NOTHING], maxlen=max_steps)  # outside of events, by step
        self._peak_gathered_bytes = 0
        self._forward = slice(0, 0)  # records of the current step that the next forward replaces

    def __repr__(self) -> str:
        kept = f"steps {self._first_step} to {self.step - 1}" if self.step else "no step yet"
        peak = f"at most {self._peak_gathered_bytes:,} bytes gathered at once"
        return f"Ledger({kept}, {len(self._labels)} units, {peak})"

    @property
    def _first_step(self) -> int:
        """Number of the oldest step that is kept."""
        return self.step - len(self._steps) + 1

    def append(self, record: Record) -> None:
        self._steps[-1].append(record)
        self.gathered_bytes += record.event.gathered_change
        self._peak_gathered_bytes = max(self._peak_gathered_bytes, self.gathered_bytes)
        for reader in self.readers:
            reader.appended(record)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Report the duration of the body to readers, as "data" or "optimizer" for example."""
        if not self.readers:
            yield
            return
        began = self.clock()
        try:
            yield
        finally:
            for reader in self.readers:
                reader.span_ended(self.step, name, began, self.clock())

    def begin_forward(self, *, has_changes: bool = False) -> None:
        """Note that an outermost forward begins, and whether parameters have changed before it."""
        self.updates += has_changes
        self.is_timed = self.takes_times or any(r.wants_times(self.step) for r in self.readers)
        for reader in self.readers:
            reader.forward_began()
        records = self._steps[-1]
        del records[self._forward]
        # Forwards with gradients but no backward, as in an evaluation without `no_grad`.
        del records[: max(0, len(records) - _MAX_RECORDS)]
        self._forward = slice(len(records), len(records))

    def end_forward(self, *, awaits_backward: bool) -> None:
        """Note that an outermost forward has ended, and whether a backward may follow."""
        for reader in self.readers:
            reader.forward_ended()
        if not awaits_backward:
            self._forward = slice(self._forward.start, len(self._steps[-1]))

    def begin_step(self) -> None:
        """Begin the next step, after the backward of the current one."""
        for reader in self.readers:
            reader.step_ended(self.step, self._steps[-1])
        self.step += 1
        self._steps.append([])
        self._sent.append(NOTHING)
        self._forward = slice(0, 0)

    def abandon_step(self) -> None:
        """Drop the records of the current step, which raised. All units have been freed."""
        self.gathered_bytes = 0
        self._steps[-1].clear()
        self._sent[-1] = NOTHING
        self._forward = slice(0, 0)
        for reader in self.readers:
            reader.step_abandoned()

    def records(self, step: int = -1) -> list[Record]:
        """The records of a step; -1 is the last complete step.

        Raises:
            IndexError: the step is too old, or has not begun.
        """
        return list(self._steps[self._position(step)])

    def _position(self, step: int) -> int:
        """The position of a step in `_steps`."""
        wanted = self.step - 1 if step == -1 else step
        position = wanted - self._first_step
        if step == -1 and not self.step:
            raise IndexError("no step has ended yet: a step is one forward and its backward")
        if wanted < 0 or not 0 <= position < len(self._steps):
            kept = f"{self._first_step} to {self.step}"
            raise IndexError(f"step {wanted} is not in the ledger, which keeps steps {kept}")
        return position

    def events(self, step: int = -1) -> list[Event]:
        """The events of a step, in order; see `records`."""
        return [record.event for record in self.records(step)]

    def names(self, step: int = -1) -> list[str]:
        """The events of a step as text, such as ``gather layers.0``; see `records`."""
        return [describe(event, self._labels) for event in self.events(step)]

    def sent_bytes(self, step: int = -1) -> AxisBytes:
        """Bytes that this rank sent in a step, by axis of the mesh; see `records`.

        They include gathers, reductions, the flags of unused parameters, matrices that an optimizer
        such as `Muon` exchanges after the step's backward, and the differences that replicas
        exchange. Norms of gradients, votes of `sw.transaction` and checkpoints are not counted.
        """
        position = self._position(step)
        sent = (record.sent for record in self._steps[position])
        return sum(sent, start=self._sent[position])

    def add_sent(self, sent: AxisBytes, *, after_backward: bool) -> None:
        """Count bytes that no event sent, in the current step or in the one that ended last."""
        is_last = after_backward and len(self._sent) > 1
        self._sent[-2 if is_last else -1] += sent
        self.outer_bytes += sent.outer

    def note_traffic_of(self, meshes: Iterable[DataParallelMesh]) -> None:
        """Make `count_sent` count the traffic of ``meshes`` in this ledger."""
        for mesh in meshes:
            _ledgers[mesh] = weakref.ref(self)

    def peak_gathered_bytes(self) -> int:
        """The peak of the bytes of gathered units, over all steps."""
        return self._peak_gathered_bytes

    def overlapped_share(self, step: int = -1) -> float:
        """The share of a step's gather time that overlapped with compute.

        The rest is exposed: compute waited for it. The share is 1 if there was nothing to gather.

        Raises:
            StepError: the step was not timed.
        """
        records = self.records(step)
        if not is_timed(records):
            raise StepError(
                "this step was not timed, which costs host time on an accelerator; set "
                "sw.ledger(model).takes_times = True before it"
            )
        busy = sum(r.busy_seconds for r in records if r.event.kind in GATHERS)
        exposed = sum(r.seconds for r in records if r.event.kind is EventKind.WAIT)
        return max(0.0, 1.0 - exposed / busy) if busy else 1.0
