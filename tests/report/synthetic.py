"""Simulated recordings: all ranks of a model of equal blocks, on a simulated clock."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwise.forecast.time.replay import schedule
from shardwise.recording.format import (
    Header,
    Line,
    MemorySample,
    RankRecording,
    RecordedEvent,
    Span,
    StepTotals,
    UnitFigures,
    file_of_rank,
    to_json,
)
from shardwise.report.findings import Finding
from shardwise.schedule.events import Event, EventKind

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan

__all__ = ["EVIL", "FINDING", "Run", "record_run", "write_run"]

EVIL = "</script><script>alert(1)</script><b>'\"&$x${y}"  # used as a name
_BYTES_PER_SECOND = 40e9
_LATENCY = 30e-6
_LAUNCH_SECONDS = 8e-6
_SECONDS_PER_ELEMENT = 60e-12
_GATHERS = (EventKind.GATHER, EventKind.RESHARD_TO_SUBGROUP)


FINDING = Finding(
    title="units 3 to 12 wait 41 ms a step for gathers: raise prefetch to 2",
    detail="41 ms of 140 ms",
    saves_seconds=0.002,
    saves_bytes=-180_000_000,
    unit=1,
    rank=2,
)


@dataclass(frozen=True)
class Run:
    """The simulated run; ``slowness`` multiplies the compute time of single ranks."""

    world_size: int = 4
    num_blocks: int = 6
    num_steps: int = 3
    prefetch: int = 1
    block_elements: int = 12_000_000
    slowness: Mapping[int, float] = field(default_factory=dict)
    labels: Sequence[str] = ()  # names of the blocks; empty: layers.0, layers.1, ...

    @property
    def units(self) -> tuple[UnitFigures, ...]:
        root = self._unit("(root)", self.block_elements * 3, None)
        labels = self.labels or [f"layers.{i}" for i in range(self.num_blocks)]
        return (root, *(self._unit(label, self.block_elements, 0) for label in labels))

    def _unit(self, label: str, num_elements: int, parent: int | None) -> UnitFigures:
        padded = -(-num_elements // (16 * self.world_size)) * 16 * self.world_size
        shard = padded // self.world_size
        return UnitFigures(
            label=label,
            num_parameters=12,
            num_elements=num_elements,
            gathered_bytes=2 * padded,
            kept_bytes=0,
            shard_bytes=4 * shard,
            own_bytes=4 * (num_elements // self.world_size),
            gradient_bytes=4 * padded,
            gradient_shard_bytes=4 * shard,
            reshard=parent is not None,
            subgroup=0,
            two_level_gather=False,
            has_child_units=parent is None,
            parent=parent,
        )


def record_run(run: Run) -> tuple[RankRecording, ...]:
    """Simulate ``run`` and return the recording of each rank."""
    return tuple(_Simulation(run).recordings())


def write_run(directory: Path, ranks: Sequence[RankRecording]) -> None:
    """Write recordings to the files that a run writes."""
    for rank in ranks:
        path = file_of_rank(directory, rank.header.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[Line] = [rank.header, *rank.events, *rank.spans, *rank.memory, *rank.steps]
        path.write_text("".join(to_json(line) + "\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True)
class _Schedule:
    units: Sequence[UnitFigures]
    prefetch: int


class _Rank:
    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.now = 0.0
        self.gathered = self.reducing = self.activations = self.unit = 0
        self.events: list[RecordedEvent] = []
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []
        self.steps: list[StepTotals] = []


class _Simulation:
    """Runs the same events in the same order on all ranks; collectives wait for the last rank."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._units = run.units
        self._shards = sum(unit.shard_bytes for unit in self._units)
        self._random = random.Random(0)
        self._ranks = [_Rank(run.slowness.get(rank, 1.0)) for rank in range(run.world_size)]
        self._free_at: defaultdict[bool, float] = defaultdict(float)  # key: is it for gathers
        self._pending: dict[tuple[bool, int], float] = {}  # ends, by (is a gather, unit)

    def recordings(self) -> Iterator[RankRecording]:
        events = schedule(cast("Plan", _Schedule(self._units, self._run.prefetch)))
        for step in range(self._run.num_steps):
            self._run_step(step, events)
        for number, rank in enumerate(self._ranks):
            header = Header(
                number,
                self._run.world_size,
                "fsdp",
                self._run.prefetch,
                1,
                "simulated",
                0.0,
                self._units,
                {"optimizer": "AdamW"},
            )
            rest = (tuple(rank.spans), tuple(rank.memory), tuple(rank.steps))
            yield RankRecording(header, tuple(rank.events), *rest)

    def _run_step(self, step: int, events: Sequence[Event]) -> None:
        for rank in self._ranks:
            self._outside(rank, step, "data", 4e-4)
        began = [(rank.now, len(rank.events)) for rank in self._ranks]
        for event in events:
            ends = self._launch(event) if event.kind in (*_GATHERS, EventKind.REDUCE) else None
            for rank in self._ranks:
                self._play(rank, step, event, ends)
        for rank, begin in zip(self._ranks, began, strict=True):
            rank.steps.append(_totals(rank, step, *begin))
            rank.activations = 0
            self._outside(rank, step + 1, "optimizer", 1.5e-3)

    def _outside(self, rank: _Rank, step: int, name: str, seconds: float) -> None:
        began = rank.now
        rank.now += seconds * self._random.uniform(0.9, 1.1)
        rank.spans.append(Span(step, name, began, rank.now))

    def _launch(self, event: Event) -> float:
        is_gather = event.kind in _GATHERS
        launched = max(rank.now for rank in self._ranks) + _LAUNCH_SECONDS
        began = max(launched, self._free_at[is_gather])
        ended = began + _LATENCY + event.bytes / _BYTES_PER_SECOND
        self._free_at[is_gather] = self._pending[is_gather, event.unit] = ended
        return ended

    def _play(self, rank: _Rank, step: int, event: Event, ends: float | None) -> None:
        began = rank.now
        spans: tuple[tuple[float, float], ...] = ()
        if ends is not None:
            rank.now += _LAUNCH_SECONDS
            spans = ((rank.now, ends),)
        elif event.kind in (EventKind.WAIT, EventKind.FINISH_REDUCE):
            key = (event.kind is EventKind.WAIT, event.unit)
            rank.now = max(rank.now, self._pending.get(key, 0.0))
        recorded = RecordedEvent(step, event.kind, event.unit, event.bytes, began, rank.now, spans)
        rank.events.append(recorded)
        self._hold(rank, step, event)
        if event.kind in (EventKind.FORWARD, EventKind.BACKWARD):
            factor = 1 if event.kind is EventKind.FORWARD else 2
            elements = self._units[event.unit].num_elements
            seconds = factor * elements * _SECONDS_PER_ELEMENT * rank.slowness
            rank.now += seconds * self._random.uniform(0.95, 1.05)

    def _hold(self, rank: _Rank, step: int, event: Event) -> None:
        unit = self._units[event.unit]
        if event.kind in _GATHERS:
            rank.gathered += event.bytes
        elif event.kind in (EventKind.FREE, EventKind.FREE_SUBGROUP):
            rank.gathered -= event.bytes
        elif event.kind is EventKind.REDUCE:
            rank.reducing += event.bytes
        elif event.kind is EventKind.FINISH_REDUCE:
            rank.reducing -= unit.gradient_bytes
        elif event.kind is EventKind.FORWARD:
            rank.unit = event.unit
            rank.activations += 3 * unit.num_elements
        elif event.kind is EventKind.BACKWARD:
            rank.unit = event.unit
            rank.activations -= 3 * unit.num_elements
        shards = self._shards
        rank.memory.append(
            MemorySample(
                step=step,
                at=rank.now,
                unit=rank.unit,
                shards=shards,
                gathered=rank.gathered,
                gradients=shards + rank.reducing,
                optimizer=2 * shards,
                activations=max(0, rank.activations),
                buffers=1 << 20,
            )
        )


def _totals(rank: _Rank, step: int, began: float, first: int) -> StepTotals:
    events = rank.events[first:]
    waits = (EventKind.WAIT, EventKind.FINISH_REDUCE)
    launched = [event for event in events if event.spans]
    return StepTotals(
        step,
        began,
        rank.now,
        updates=step,
        exposed_seconds=sum(event.seconds for event in events if event.event in waits),
        communication_seconds=sum(end - begin for e in launched for begin, end in e.spans),
        communication_bytes=sum(event.bytes for event in launched),
        peak_gathered_bytes=max(one.gathered for one in rank.memory[first:]),
        tokens=4096 - 512 * (step % 2),
        padded_tokens=512 * (step % 2),
    )
