"""The ledger: the events of the last steps, with the time each took."""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from shardwise.plan.axes import NOTHING, AxisBytes
from shardwise.schedule.events import GATHERS, Event, EventKind, describe
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.transport.api import Work

__all__ = ["Ledger", "LedgerReader", "Record", "note_sent"]

_MAX_RECORDS = 1 << 14  # of forwards that wait for their backward: more than 100 layers x 32 passes


# Weakly on both sides: a reader of a ledger may hold parameters, which hold their mesh.
_ledgers: "weakref.WeakKeyDictionary[DataParallelMesh, weakref.ref[Ledger]]" = (
    weakref.WeakKeyDictionary()
)


def note_sent(mesh: DataParallelMesh | None, work: Work, *, after_backward: bool = False) -> None:
    """Have the ledger of the model on ``mesh`` count ``work``, which no event of it launched.

    Args:
        mesh: of a parameter or a unit; that of a model has a ledger.
        work: a collective that was launched.
        after_backward: it belongs to the step whose backward has ended last.
    """
    reference = None if mesh is None else _ledgers.get(mesh)
    ledger = None if reference is None else reference()
    if ledger is not None and mesh is not None:
        ledger.add_sent(mesh.axis_bytes([work]), after_backward=after_backward)


@dataclass(slots=True)
class Record:
    """One event that took place.

    Times are seconds of `time.perf_counter`, of the stream that computes: floats, or events of a
    device that are converted to floats when they have taken place.
    """

    event: Event
    step: int
    began: SupportsFloat
    ended: SupportsFloat = 0.0
    works: tuple[Work, ...] = ()  # the communication that it launched
    sent: AxisBytes = NOTHING  # what this rank sends in it

    @property
    def seconds(self) -> float:
        """How long it took; for a wait, exposed communication."""
        return float(self.ended) - float(self.began)

    @property
    def busy_seconds(self) -> float:
        """How long the communication that it launched ran."""
        return sum(ended - began for began, ended in (work.span for work in self.works))


class LedgerReader:
    """Is called when the ledger is written. Its methods do nothing, for readers that need some."""

    def forward_began(self) -> None:
        """An outermost forward is about to enter its first unit."""

    def forward_ended(self) -> None:
        """It has ended."""

    def appended(self, record: Record) -> None:
        """An event of the step under way took place, or was launched."""

    def step_ended(self, step: int, records: Sequence[Record]) -> None:
        """A backward has ended; on a device it may still run."""

    def step_abandoned(self) -> None:
        """The step under way raised, and is tried again under the same number."""

    def span_ended(self, step: int, name: str, began: SupportsFloat, ended: SupportsFloat) -> None:
        """What a user of the model named has ended; ``step`` is under way or the next one."""


class Ledger:
    """The events of the last ``max_steps`` steps.

    A step is one forward and the backward that follows it, so accumulation makes several of one
    optimizer step. A forward that no backward can follow, as under `torch.no_grad`, is part of the
    step under way until the next forward begins.
    """

    def __init__(
        self,
        labels: Sequence[str],
        max_steps: int = 8,
        clock: Callable[[], SupportsFloat] = time.perf_counter,  # of the stream that computes
    ) -> None:
        self._labels = labels  # of the plan's units
        self.clock = clock
        self.readers: list[LedgerReader] = []
        self.outer_bytes = 0  # of all differences that this rank has sent to other replicas
        self.updates = 0  # forwards before which parameters had changed
        self._steps: deque[list[Record]] = deque([[]], maxlen=max_steps)
        self._sent = deque([NOTHING], maxlen=max_steps)  # outside of events, by step
        self._step = 0
        self._gathered_bytes = 0
        self._peak_gathered_bytes = 0
        self._forward = slice(0, 0)  # of the step under way: records that the next forward replaces

    def __repr__(self) -> str:
        first = self._step - len(self._steps) + 1
        kept = f"steps {first} to {self._step - 1}" if self._step else "no step yet"
        peak = f"at most {self._peak_gathered_bytes:,} bytes gathered at once"
        return f"Ledger({kept}, {len(self._labels)} units, {peak})"

    @property
    def step(self) -> int:
        """Number of the step under way, from 0."""
        return self._step

    def append(self, record: Record) -> None:
        self._steps[-1].append(record)
        self._gathered_bytes += record.event.gathered_change
        self._peak_gathered_bytes = max(self._peak_gathered_bytes, self._gathered_bytes)
        for reader in self.readers:
            reader.appended(record)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Have readers know when the body of the ``with`` ran, such as "data" or "optimizer"."""
        began = self.clock()
        try:
            yield
        finally:
            for reader in self.readers:
                reader.span_ended(self._step, name, began, self.clock())

    def begin_forward(self, *, has_changes: bool = False) -> None:
        """An outermost forward begins, perhaps with other parameters than the one before."""
        self.updates += has_changes
        for reader in self.readers:
            reader.forward_began()
        records = self._steps[-1]
        del records[self._forward]
        # Forwards with gradients that no backward follows, as in an evaluation without `no_grad`.
        del records[: max(0, len(records) - _MAX_RECORDS)]
        self._forward = slice(len(records), len(records))

    def end_forward(self, *, awaits_backward: bool) -> None:
        """It has ended, and a backward may follow or not."""
        for reader in self.readers:
            reader.forward_ended()
        if not awaits_backward:
            self._forward = slice(self._forward.start, len(self._steps[-1]))

    def begin_step(self) -> None:
        """The backward of the step under way has ended."""
        for reader in self.readers:
            reader.step_ended(self._step, self._steps[-1])
        self._step += 1
        self._steps.append([])
        self._sent.append(NOTHING)
        self._forward = slice(0, 0)

    def abandon_step(self) -> None:
        """The step under way raised: everything was freed, and its records mean little."""
        self._gathered_bytes = 0
        self._steps[-1].clear()
        self._sent[-1] = NOTHING
        self._forward = slice(0, 0)
        for reader in self.readers:
            reader.step_abandoned()

    def records(self, step: int = -1) -> list[Record]:
        """What happened in a step that is still kept; -1 is the last complete one.

        Raises:
            IndexError: the step is too old, or has not been.
        """
        return list(self._steps[self._position(step)])

    def _position(self, step: int) -> int:
        """Of a step among those that are kept."""
        wanted = self._step - 1 if step == -1 else step
        position = wanted - (self._step - len(self._steps) + 1)
        if step == -1 and not self._step:
            raise IndexError("no step has ended yet: a step is one forward and its backward")
        if wanted < 0 or not 0 <= position < len(self._steps):
            kept = f"{self._step - len(self._steps) + 1} to {self._step}"
            raise IndexError(f"step {wanted} is not in the ledger, which keeps steps {kept}")
        return position

    def events(self, step: int = -1) -> list[Event]:
        """The events of a step, in order; see `records`."""
        return [record.event for record in self.records(step)]

    def names(self, step: int = -1) -> list[str]:
        """The events of a step as text, such as ``gather layers.0``; see `records`."""
        return [describe(event, self._labels) for event in self.events(step)]

    def sent_bytes(self, step: int = -1) -> AxisBytes:
        """What this rank has sent in a step, by axis of the mesh; see `records`.

        Gathers, reductions, the flags of unused parameters, what an optimizer such as `Muon` moves
        to and from owners after the step's backward, and the differences of `sw.Outer`. Norms of
        gradients, votes of `sw.transaction` and checkpoints are left out.
        """
        position = self._position(step)
        sent = (record.sent for record in self._steps[position])
        return sum(sent, start=self._sent[position])

    def add_sent(self, sent: AxisBytes, *, after_backward: bool) -> None:
        """Count bytes that no event of the step under way, or of the last one, has sent."""
        is_of_last = after_backward and len(self._sent) > 1
        self._sent[-2 if is_of_last else -1] += sent
        self.outer_bytes += sent.outer

    def note_traffic_of(self, meshes: Iterable[DataParallelMesh]) -> None:
        """Count what `note_sent` is told of these."""
        for mesh in meshes:
            _ledgers[mesh] = weakref.ref(self)

    @property
    def gathered_bytes(self) -> int:
        """What gathered units take now."""
        return self._gathered_bytes

    def peak_gathered_bytes(self) -> int:
        """The most that gathered units took at once, over all steps."""
        return self._peak_gathered_bytes

    def overlapped_share(self, step: int = -1) -> float:
        """Share of the time that gathers ran in a step in which compute did not wait for them.

        1 if there was nothing to gather. The exposed part of a gather is the wait for it.
        """
        records = self.records(step)
        busy = sum(r.busy_seconds for r in records if r.event.kind in GATHERS)
        exposed = sum(r.seconds for r in records if r.event.kind is EventKind.WAIT)
        return max(0.0, 1.0 - exposed / busy) if busy else 1.0
