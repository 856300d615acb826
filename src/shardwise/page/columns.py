"""The timeline and memory of a step as compressed columns of numbers, for the page's script.

A step consists of the columns below, one after the other, widest first so that each is aligned.
Each column starts with rank 0, and the bars of a rank are sorted by track and then by time. Times
are ticks from the start of the step, which lasts 2^32 - 1 ticks. ::

    bars      began uint32, lasted uint32, bytes float32
    memory    at uint32, one float32 column for each category
    bars      label uint16                   (memory: the unit)  uint16
    bars      kind uint8
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.page.timeline import Bar, Timeline, Track
from shardwise.recording.format import MEMORY_CATEGORIES, MemorySample

__all__ = ["EncodedStep", "Labels", "encode_step"]

_TICKS = 2**32 - 1


class Labels:
    """Numbers for the names of bars: units first, then spans in order of appearance."""

    def __init__(self, units: Sequence[str]) -> None:
        self.names = list(units)
        self._numbers: dict[str, int] = {}

    def number_of(self, bar: Bar) -> int:
        if bar.unit is not None:
            return bar.unit
        if bar.name not in self._numbers:
            self._numbers[bar.name] = len(self.names)
            self.names.append(bar.name)
        return self._numbers[bar.name]


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """One step: its entry in the page's index, and its columns."""

    index: dict[str, Any]
    columns: str  # gzip, then base64


@dataclass(frozen=True, slots=True)
class _RankColumns:
    tracks: tuple[NDArray[np.float64], ...]  # rows: began, lasted, bytes, label, kind
    memory: NDArray[np.float64]  # rows: time, unit, categories


def encode_step(lines: Sequence[Timeline], step: int, labels: Labels) -> EncodedStep:
    """Encode one complete step from the timelines of all ranks."""
    found = [_rank_columns(line, step, labels) for line in lines]
    bars = np.concatenate([track for rank in found for track in rank.tracks])
    memory = np.concatenate([rank.memory for rank in found])
    began = float(bars[:, 0].min())
    seconds = max(float((bars[:, 0] + bars[:, 1]).max()) - began, 1e-9)
    ticks = _TICKS / seconds
    columns = (
        ((bars[:, 0] - began) * ticks).astype(np.uint32),
        (bars[:, 1] * ticks).astype(np.uint32),
        bars[:, 2].astype(np.float32),
        ((memory[:, 0] - began) * ticks).clip(0, _TICKS).astype(np.uint32),
        memory[:, 2:].T.astype(np.float32),
        bars[:, 3].astype(np.uint16),
        memory[:, 1].astype(np.uint16),
        bars[:, 4].astype(np.uint8),
    )
    index = {
        "step": step,
        "seconds": seconds,
        "stepSeconds": max(line.totals(step).seconds for line in lines),
        "exposedSeconds": mean(line.totals(step).exposed_seconds or 0.0 for line in lines),
        "bars": [[len(track) for track in rank.tracks] for rank in found],
        "samples": [len(rank.memory) for rank in found],
    }
    return EncodedStep(index, _compress(b"".join(column.tobytes() for column in columns)))


def _rank_columns(line: Timeline, step: int, labels: Labels) -> _RankColumns:
    tracks: tuple[list[tuple[float, ...]], ...] = tuple([] for _ in Track)
    for bar in (*line.bars(step), *line.bars_around(step)):
        row = (bar.began, bar.ended - bar.began, bar.bytes, labels.number_of(bar), bar.kind)
        tracks[bar.track].append(row)
    samples = [_sample_row(sample) for sample in line.memory(step)]
    return _RankColumns(
        tuple(np.array(sorted(track), dtype=np.float64).reshape(-1, 5) for track in tracks),
        np.array(samples, dtype=np.float64).reshape(-1, 2 + len(MEMORY_CATEGORIES)),
    )


def _sample_row(sample: MemorySample) -> tuple[float, ...]:
    return (sample.at, sample.unit, *(getattr(sample, name) for name in MEMORY_CATEGORIES))


def _compress(columns: bytes) -> str:
    compressor = zlib.compressobj(1, wbits=31)  # gzip format, which browsers read
    return base64.b64encode(compressor.compress(columns) + compressor.flush()).decode()
