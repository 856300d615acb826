"""The trace of a recording in the format that Perfetto reads."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shardwise as sw
from shardwise.recording.format import (
    Header,
    MemorySample,
    RankRecording,
    RecordedEvent,
    Span,
    StepTotals,
    UnitFigures,
)
from shardwise.report.report import report
from shardwise.report.trace import trace_events, write_trace
from shardwise.schedule.events import EventKind
from tests.models import CASES, build
from tests.report.opening import assert_opens

Json = dict[str, Any]


def unit(label: str) -> UnitFigures:
    return UnitFigures(label, 1, 8, 32, 0, 16, 16, 32, 16, True, 0, False, False, None)


def event(
    kind: EventKind, began: float, ended: float, *spans: tuple[float, float], unit: int = 0
) -> RecordedEvent:
    return RecordedEvent(3, kind, unit, 64 if spans else 0, began, ended, spans)


def recording_of(*events: RecordedEvent, rank: int = 0, shift: float = 0.0) -> RankRecording:
    header = Header(rank, 2, "fsdp", 1, 1, "cpu", 0.0, (unit("a"), unit("b")), {})
    moved = [
        replace(
            one,
            began=one.began + shift,
            ended=one.ended + shift,
            spans=tuple((began + shift, ended + shift) for began, ended in one.spans),
        )
        for one in events
    ]
    return RankRecording(
        header,
        tuple(moved),
        (Span(3, "data", 9.0 + shift, 9.5 + shift),),
        (MemorySample(1, 2, 3, 4, 5, 6, step=3, at=10.6 + shift, unit=0),),
        (StepTotals(3, 10.0 + shift, 13.0 + shift, 0, 0.5, 1.0, 64, 64),),
    )


STEP = (
    event(EventKind.GATHER, 10.0, 10.1, (10.1, 10.5)),
    event(EventKind.WAIT, 10.1, 10.6),
    event(EventKind.GATHER, 10.6, 10.6, (10.6, 10.7), unit=1),
    event(EventKind.FORWARD, 10.6, 10.6),
    event(EventKind.WAIT, 11.0, 11.0, unit=1),  # the gather was done before
    event(EventKind.FORWARD, 11.0, 11.0, unit=1),
    event(EventKind.BACKWARD, 11.5, 11.5, unit=1),
    event(EventKind.REDUCE, 12.0, 12.0, (12.0, 12.6), unit=1),
    event(EventKind.BACKWARD, 12.0, 12.0),
    event(EventKind.FINISH_REDUCE, 12.4, 12.7, unit=1),
    event(EventKind.FREE, 13.0, 13.0),
)


def slices(events: Sequence[Json], track: str, rank: int = 0) -> list[tuple[str, int, int]]:
    """Return (name, start, duration) of the slices of a track, in milliseconds."""
    return [
        (one["name"], round(one["ts"] / 1e3), round(one["dur"] / 1e3))
        for one in events
        if one["ph"] == "X" and one["cat"] == track and one["pid"] == rank
    ]


def test_each_stream_of_a_rank_has_a_track() -> None:
    events = trace_events([recording_of(*STEP)])
    assert slices(events, "compute") == [
        ("wait a", 1100, 500),
        ("forward a", 1600, 400),
        ("forward b", 2000, 500),  # until the next unit begins
        ("backward b", 2500, 500),
        ("backward a", 3000, 400),
        ("finish_reduce b", 3400, 300),
        ("backward a", 3700, 300),  # until the end of the step
    ]
    assert slices(events, "gathers") == [("gather a", 1100, 400), ("gather b", 1600, 100)]
    assert slices(events, "reductions") == [("reduce b", 3000, 600)]
    assert slices(events, "around the steps") == [("data", 0, 500)]
    assert slices(events, "steps") == [("step 3", 1000, 3000)]
    (memory,) = (one for one in events if one["ph"] == "C")
    assert memory["args"] == {
        "shards": 1,
        "optimizer": 2,
        "gradients": 3,
        "gathered": 4,
        "activations": 5,
        "buffers": 6,
    }


def test_ranks_are_processes_on_one_clock() -> None:
    ranks = [recording_of(*STEP), recording_of(*STEP, rank=1, shift=0.2)]
    events = trace_events(ranks)
    first, second = (slices(events, "compute", rank) for rank in range(2))
    assert [start + 200 for _, start, _ in first] == [start for _, start, _ in second]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_arrows_lead_from_a_collective_to_the_compute_that_needs_it() -> None:
    events = trace_events([recording_of(*STEP)])
    ends = defaultdict(list)
    for one in events:
        if one["ph"] in "sf":
            ends[one["id"]].append((one["ph"], around(events, one)))
    assert sorted(ends.values()) == [
        [("s", "gather a"), ("f", "wait a")],
        [("s", "gather b"), ("f", "forward b")],
        [("s", "reduce b"), ("f", "finish_reduce b")],
    ]


def around(events: Sequence[Json], flow: Json) -> str:
    """Return the slice that Perfetto binds one end of an arrow to."""
    found = [
        one["name"]
        for one in events
        if one["ph"] == "X"
        and (one["pid"], one["tid"]) == (flow["pid"], flow["tid"])
        and one["ts"] <= flow["ts"] < one["ts"] + one["dur"]
    ]
    (name,) = found
    return str(name)


def test_a_trace_opens(tmp_path: Path) -> None:
    write_trace([recording_of(*STEP), recording_of(*STEP, rank=1)], tmp_path / "trace.json")
    assert_opens(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


@pytest.mark.parametrize("recording", [[], [recording_of()]])
def test_a_recording_without_events_has_a_trace(recording: list[RankRecording]) -> None:
    assert all(one["ph"] != "s" for one in trace_events(recording))


def test_copies_of_states_have_tracks_of_their_own(tmp_path: Path) -> None:
    model = sw.fully_shard(
        build("stack"), units="auto", offload_policy=sw.CPUOffloadPolicy(step="device")
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with sw.record(model, tmp_path, steps=(1, 2, 3)):
        for _ in range(5):
            torch.autograd.backward(CASES["stack"].loss(model(CASES["stack"].batch(4))))
            optimizer.step()
            optimizer.zero_grad()
    written = report(tmp_path, None, tmp_path / "trace.json", Console(quiet=True))
    assert tmp_path / "trace.json" in written
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for track in ("states to device", "states to host"):
        assert sum(event.get("cat") == track for event in events) == 3 * 4  # units
