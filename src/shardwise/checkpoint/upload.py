"""Writing to a store that takes whole objects: each file is sent by one rank.

Files are assigned to ranks. In each round every rank sends the next bytes of its file to the store,
after it has received those that other ranks hold. So a rank needs a few megabytes for the round,
plus what fsspec keeps of an upload, however large the file is.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.checksums import BLOCK_BYTES, BlockPart, crc32, split_at_blocks
from shardwise.checkpoint.collect import WriteJob
from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.format import File
from shardwise.checkpoint.slices import Slices, bytes_of
from shardwise.checkpoint.stores import Folder, errors_at
from shardwise.errors import StepError

__all__ = ["assign_files", "upload"]

# Of a round, over all files. In the worst case one rank holds all of it, twice.
ROUND_BYTES = 4 << 20
PART_BYTES = 8 << 20  # of an upload; S3 requires at least 5 MiB
_MAX_PARTS = 9000  # S3 allows 10,000
_MIN_BYTES = 1 << 16  # of a round, for one file


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes ``[start, stop)`` of a tensor, in one block and on one rank."""

    tensor: int  # its number in the checkpoint
    start: int
    stop: int
    rank: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one rank sends in a round: segments of a file in the order of their bytes."""

    file: File | None  # None after the last one
    segments: Sequence[_Segment] = ()


def upload(folder: Folder, job: WriteJob, ranks: Coordinator) -> list[BlockPart]:
    """Send all files of ``job`` but the manifest, and return the checksums of this rank's bytes.

    Raises:
        CheckpointError: on all ranks, after every upload was given up.
    """
    holders = _holders(job.slices, ranks)
    assigned = assign_files(job.files, ranks.size)
    max_bytes = _round_bytes(sum(map(bool, assigned)))
    streams = [
        chain.from_iterable(
            _batches(file, _segments(job.numbers[file.name], holders, max_bytes), max_bytes)
            for file in files
        )
        for files in assigned
    ]
    uploads = _Uploads(folder)
    try:
        return _send(zip_longest(*streams, fillvalue=_Batch(None)), job, uploads, ranks)
    except BaseException as error:
        uploads.discard()
        # All uploads end before rank 0 removes what was sent; a lost rank cannot be waited for.
        if isinstance(error, Exception) and not isinstance(error, StepError):
            ranks.all_gather(b"")
        raise


def assign_files(files: Sequence[File], num_ranks: int) -> list[list[File]]:
    """The files of each rank: the largest first, each to the rank with the fewest bytes."""
    assigned: list[list[File]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        rank = loads.index(min(loads))
        assigned[rank].append(file)
        loads[rank] += file.num_bytes
    return assigned


def _round_bytes(num_files: int) -> int:
    """The bytes of each of ``num_files`` in a round: a power of two."""
    return max(_MIN_BYTES, 1 << (ROUND_BYTES // max(1, num_files)).bit_length() - 1)


class _Uploads:
    """The files that this rank sends, one after the other; each appears once it is closed."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._file: File | None = None
        self._stream: Any = None  # to the store

    def write(self, file: File | None, contents: Iterable[memoryview]) -> None:
        """Append to ``file``; the one before it is closed first."""
        if file is not self._file:
            self._next(file)
        if file is not None:
            with errors_at(self.folder / file.name):
                for content in contents:
                    self._stream.write(content)

    def discard(self) -> None:
        """Give up. Stores that cannot do so keep half a file, which is removed later."""
        # Without `close` the garbage collector would close it, at an unknown time.
        for end in ("discard", "close"):
            with contextlib.suppress(Exception):
                getattr(self._stream, end)()

    def _next(self, file: File | None) -> None:
        if self._file is not None:
            with errors_at(self.folder / self._file.name):
                self._stream.close()
        self._file, self._stream = file, None
        if file is not None:
            place = self.folder / file.name
            part_bytes = max(PART_BYTES, -(-file.num_bytes // _MAX_PARTS))
            with errors_at(place):
                self._stream = self.folder.store.open(place.path, "wb", block_size=part_bytes)
                self._stream.write(file.head)


def _send(
    rounds: Iterable[Sequence[_Batch]],
    job: WriteJob,
    uploads: _Uploads,
    ranks: Coordinator,
) -> list[BlockPart]:
    """In each round, every rank sends the batch at its own position."""
    parts: list[BlockPart] = []
    batch = _Batch(None)
    contents: Iterable[memoryview] = ()
    for batches in rounds:
        with ranks.raises_together("upload"):
            uploads.write(batch.file, contents)
            held = [_joined(batch, job.slices, ranks.rank, parts) for batch in batches]
        batch = batches[ranks.rank]
        contents = _in_order(batch, ranks.all_to_all(held, _bytes_by_rank(batch, ranks.size)))
    with ranks.raises_together("upload"):
        uploads.write(batch.file, contents)
        uploads.write(None, ())
        if ranks.rank == 0:
            for name, content in job.others.items():
                uploads.folder.put(name, content)
    return parts


def _joined(batch: _Batch, own: Slices, rank: int, parts: list[BlockPart]) -> Tensor:
    """This rank's bytes of a batch. Their checksums are added to ``parts``."""
    joined = bytearray()
    for segment in batch.segments:
        if segment.rank == rank:
            content = own[segment.tensor].bytes_between(segment.start, segment.stop)
            parts.append(BlockPart(segment.tensor, segment.start, segment.stop, crc32(content)))
            joined += content
    return torch.from_numpy(np.frombuffer(joined, dtype=np.uint8))


def _bytes_by_rank(batch: _Batch, num_ranks: int) -> list[int]:
    """How many bytes of a batch each rank holds."""
    sizes = [0] * num_ranks
    for segment in batch.segments:
        sizes[segment.rank] += segment.num_bytes
    return sizes


def _in_order(batch: _Batch, received: Iterable[Tensor]) -> Iterator[memoryview]:
    """The contents of a batch from those of each rank."""
    rest = [bytes_of(content) for content in received]
    for segment in batch.segments:
        yield rest[segment.rank][: segment.num_bytes]
        rest[segment.rank] = rest[segment.rank][segment.num_bytes :]


_Holders = Mapping[int, Sequence[tuple[int, int, int]]]


def _holders(own: Slices, ranks: Coordinator) -> _Holders:
    """By tensor: the bytes that ranks hold, ``(start, stop, rank)``, in ascending order."""
    rows = [(number, held.start_byte, held.stop_byte) for number, held in own.items()]
    holders: dict[int, list[tuple[int, int, int]]] = {}
    for rank, encoded in enumerate(ranks.all_gather(np.array(rows, dtype=np.int64).tobytes())):
        for number, start, stop in np.frombuffer(encoded, dtype=np.int64).reshape(-1, 3).tolist():
            if start < stop:
                holders.setdefault(number, []).append((start, stop, rank))
    return {number: sorted(found) for number, found in holders.items()}


def _segments(tensors: Iterable[int], holders: _Holders, max_bytes: int) -> Iterator[_Segment]:
    """The contents of tensors, given by their numbers."""
    size = min(max_bytes, BLOCK_BYTES)  # both are powers of two
    for number in tensors:
        for start, stop, rank in holders.get(number, ()):
            for begin, end in split_at_blocks(start, stop, size):
                yield _Segment(number, begin, end, rank)


def _batches(file: File, segments: Iterable[_Segment], max_bytes: int) -> Iterator[_Batch]:
    """At least one, although no tensor of the file may have elements."""
    batch: list[_Segment] = []
    room = max_bytes
    for segment in segments:
        if segment.num_bytes > room:
            yield _Batch(file, batch)
            batch, room = [], max_bytes
        batch.append(segment)
        room -= segment.num_bytes
    yield _Batch(file, batch)
