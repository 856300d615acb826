"""Converts finished steps and spans to the lines of a recording."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import SupportsFloat

from shardwise.comm.device import Device
from shardwise.recording.format import (
    HeldBytes,
    Line,
    MemorySample,
    RecordedEvent,
    Span,
    StepTotals,
)
from shardwise.runtime.ledger import Record, is_timed
from shardwise.schedule.events import COPIES, WAITS

__all__ = ["EndedSpan", "EndedStep", "recorded_event"]


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span that has ended on the host, maybe not yet on the device."""

    step: int
    name: str
    began: SupportsFloat
    ended: SupportsFloat

    def is_over(self, device: Device) -> bool:
        """Whether its times are known without blocking the host."""
        return device.is_over(self.ended)

    def lines(self, offset: float) -> Iterator[Line]:
        yield Span(self.step, self.name, float(self.began) + offset, float(self.ended) + offset)


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended on the host, maybe not yet on the device."""

    step: int
    records: Sequence[Record]
    samples: Sequence[tuple[Record, HeldBytes]]
    updates: int
    gathered_bytes: int  # at the end of the step
    tokens: tuple[int, int] | None  # (tokens that counted, padding)
    is_detailed: bool
    began: SupportsFloat
    ended: SupportsFloat

    def is_over(self, device: Device) -> bool:
        works = (work for record in self.records for work in record.works)
        return device.is_over(self.ended) and all(
            work.done and device.is_over(work.times[1]) for work in works
        )

    def lines(self, offset: float) -> Iterator[Line]:
        """Yield its events and memory if it is detailed, and its totals, on the clock of rank 0."""
        if not self.records:
            return
        if self.is_detailed:
            for record in self.records:
                yield recorded_event(self.step, record, offset)
            kept = set(map(id, self.records))  # samples of an evaluation are left out
            for record, held in self.samples:
                if id(record) in kept:
                    at, unit = float(record.ended) + offset, record.event.unit
                    yield MemorySample(**asdict(held), step=self.step, at=at, unit=unit)
        yield self._totals(offset)

    def _totals(self, offset: float) -> StepTotals:
        records = self.records
        tokens, padded = self.tokens or (None, None)
        changes = list(accumulate(record.event.gathered_change for record in records))
        before = self.gathered_bytes - changes[-1]
        launched = [r for r in records if r.works and r.event.kind not in COPIES]
        exposed = busy = None
        if is_timed(records):
            exposed = sum(record.seconds for record in records if record.event.kind in WAITS)
            busy = sum(record.busy_seconds for record in launched)
        return StepTotals(
            step=self.step,
            began=float(self.began) + offset,
            ended=float(self.ended) + offset,
            updates=self.updates,
            exposed_seconds=exposed,
            communication_seconds=busy,
            communication_bytes=sum(record.event.bytes for record in launched),
            peak_gathered_bytes=before + max(0, *changes),
            tokens=tokens,
            padded_tokens=padded,
        )


def recorded_event(step: int, record: Record, offset: float) -> RecordedEvent:
    """Convert ``record``, with ``offset`` added to the clock of this rank."""
    spans = [(began + offset, ended + offset) for began, ended in (w.span for w in record.works)]
    return RecordedEvent(
        step=step,
        event=record.event.kind,
        unit=record.event.unit,
        bytes=record.event.bytes,
        began=float(record.began) + offset,
        ended=float(record.ended) + offset,
        spans=tuple(spans),
    )
