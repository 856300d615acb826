from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.recording.format import (
    Header,
    Line,
    RecordedEvent,
    RecordingError,
    Span,
    StepTotals,
    file_of_rank,
    read_recording,
    to_json,
)
from shardwise.schedule.events import EventKind


def header_of(rank: int, world_size: int) -> Header:
    return Header(rank, world_size, "fsdp", 1, 1, "cpu", 0.0, (), {"optimizer": "AdamW"})


def write(directory: Path, rank: int, *lines: Line, tail: str = "") -> Path:
    path = file_of_rank(directory, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(to_json(line) + "\n" for line in lines) + tail)
    return path


EVENT = RecordedEvent(3, EventKind.GATHER, 0, 64, 1.0, 1.5, ((1.0, 2.0),))
STEP = StepTotals(3, 1.0, 4.0, 0, 0.5, 1.0, 64, 64)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    span = Span(3, "data", 0.0, 1.0)
    for rank in range(2):
        write(tmp_path, rank, header_of(rank, 2), EVENT, span, STEP)
    first, second = read_recording(tmp_path)
    assert first.header == header_of(0, 2)
    assert second.events == (EVENT,)
    assert (second.spans, second.steps) == ((span,), (STEP,))
    assert second.detailed_steps == (3,)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, header_of(0, 1), EVENT, tail='{"kind":"ev')
    (rank,) = read_recording(tmp_path)
    assert rank.events == (EVENT,)
    assert rank.detailed_steps == ()  # the end of the step was not recorded


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ('{"kind":"event","step":1}\n', r"rank-00000.jsonl: line 3, event.*required"),
        ("nonsense\n", r"rank-00000.jsonl: .*[Ii]nvalid JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, tail: str, message: str) -> None:
    write(tmp_path, 0, header_of(0, 1), EVENT, tail=tail)
    with pytest.raises(RecordingError, match=message):
        read_recording(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no recording"):
        read_recording(tmp_path)
    write(tmp_path, 1, header_of(1, 2))
    with pytest.raises(
        RecordingError, match=r"expected the files of 2 ranks, got the files of ranks \[1\]"
    ):
        read_recording(tmp_path)
    with pytest.raises(ConfigError, match="is a recording; expected the directory that contains"):
        read_recording(tmp_path / "recording")
