"""A recording as a Chrome trace, for https://ui.perfetto.dev or about:tracing.

Each rank is a process. Its tracks are the steps, the spans around them, the compute stream with its
waits, and the gather and reduce streams. Arrows lead from a collective to the wait for it or to the
first use of its result.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.page.timeline import by_step, compute_spans
from shardwise.recording.format import MEMORY_CATEGORIES, RankRecording, RecordedEvent
from shardwise.schedule.events import EventKind

__all__ = ["trace_events", "write_trace"]

_TRACKS = (
    "steps",
    "around the steps",
    "compute",
    "gathers",
    "reductions",
    "states to device",
    "states to host",
)
_LAUNCHES = {
    EventKind.GATHER: "gathers",
    EventKind.RESHARD_TO_SUBGROUP: "gathers",
    EventKind.REDUCE: "reductions",
    EventKind.STATES_TO_DEVICE: "states to device",
    EventKind.STATES_TO_HOST: "states to host",
}
_NEEDS = {
    EventKind.WAIT: "gathers",
    EventKind.FORWARD: "gathers",
    EventKind.BACKWARD: "gathers",
    EventKind.FINISH_REDUCE: "reductions",
}

_Json = dict[str, Any]


def write_trace(recording: Sequence[RankRecording], path: str | Path) -> None:
    """Write ``recording``, as `read_recording` returns it, to ``path``."""
    trace = {"traceEvents": trace_events(recording), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def trace_events(recording: Sequence[RankRecording]) -> list[_Json]:
    """Return the events of the trace: names first, then events by time.

    Times are microseconds since the first event.
    """
    found = [event for rank in recording for event in _Rank(rank).trace()]
    origin = min((event["ts"] for event in found), default=0.0)
    for event in found:
        event["ts"] = (event["ts"] - origin) * 1e6
    names = [event for rank in recording for event in _names(rank.header.rank)]
    return names + sorted(found, key=lambda event: event["ts"])


def _names(rank: int) -> Iterator[_Json]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, track in enumerate(_TRACKS):
        place = {"ph": "M", "pid": rank, "tid": number}
        yield {**place, "name": "thread_name", "args": {"name": track}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": number}}


class _Rank:
    def __init__(self, recording: RankRecording) -> None:
        self._recording = recording
        self._labels = [unit.label for unit in recording.header.units]
        self._num_flows = 0

    def trace(self) -> Iterator[_Json]:
        for step in self._recording.steps:
            figures = asdict(step) | {"kind": "step"}
            yield self._slice("steps", f"step {step.step}", step.began, step.ended, figures)
        for span in self._recording.spans:
            figures = {"step": span.step}
            yield self._slice("around the steps", span.name, span.began, span.ended, figures)
        for events in by_step(self._recording.events).values():
            yield from self._step(events)
        for sample in self._recording.memory:
            held = {name: getattr(sample, name) for name in MEMORY_CATEGORIES}
            yield {
                "ph": "C",
                "name": "memory (bytes)",
                "pid": self._recording.header.rank,
                "ts": sample.at,
                "args": held,
            }

    def _step(self, events: Sequence[RecordedEvent]) -> Iterator[_Json]:
        # Slices of the collectives that nothing has waited for or used yet, by track and unit.
        launched: defaultdict[tuple[str, int], list[_Json]] = defaultdict(list)
        for event in events:
            for began, ended in event.spans:
                track, figures = _LAUNCHES[event.event], {"bytes": event.bytes}
                one = self._slice(track, self._name(event), began, ended, figures)
                launched[track, event.unit].append(one)
                yield one
        for event, began, ended in compute_spans(events, events[-1].ended):
            yield self._slice("compute", self._name(event), began, ended, {"step": event.step})
            needed = launched[_NEEDS.get(event.event, ""), event.unit]
            while needed and needed[0]["ts"] < ended:
                one = needed.pop(0)
                yield from self._arrow(one, (max(began, one["ts"]) + ended) / 2)

    def _arrow(self, launched: _Json, at: float) -> Iterator[_Json]:
        self._num_flows += 1
        rank = self._recording.header.rank
        flow = {"name": "needed by", "cat": "flow", "id": f"{rank}.{self._num_flows}", "pid": rank}
        yield {**flow, "ph": "s", "tid": launched["tid"], "ts": launched["ts"]}
        # bp "e": the arrow ends in the slice that encloses this time, and not in the next slice.
        yield {**flow, "ph": "f", "bp": "e", "tid": _TRACKS.index("compute"), "ts": at}

    def _slice(self, track: str, name: str, began: float, ended: float, figures: _Json) -> _Json:
        return {
            "ph": "X",
            "name": name,
            "cat": track,
            "pid": self._recording.header.rank,
            "tid": _TRACKS.index(track),
            "ts": began,
            "dur": max(0.0, ended - began) * 1e6,
            "args": figures,
        }

    def _name(self, event: RecordedEvent) -> str:
        return f"{event.event.value} {self._labels[event.unit]}"
