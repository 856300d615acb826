"""Writing to a store that accepts only whole objects: one rank sends each file.

Files are assigned to ranks. In each round, every rank receives the next bytes of its file from the
ranks that hold them and sends them to the store. However large the file is, a rank needs a few
megabytes for the round, plus fsspec's buffer for the upload.
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
from shardwise.checkpoint.directory import check_shared
from shardwise.checkpoint.format import File, in_groups
from shardwise.checkpoint.slices import Slices, bytes_of
from shardwise.checkpoint.stores import Folder, errors_at
from shardwise.errors import StepError

__all__ = ["assign_files", "upload"]

# Bytes of all files in one round. In the worst case, one rank holds them twice.
ROUND_BYTES = 4 << 20
PART_BYTES = 8 << 20  # bytes in one part of an upload; S3 requires at least 5 MiB
_MAX_PARTS = 9000  # S3 allows 10,000
_MIN_BYTES = 1 << 16  # minimum bytes of one file in a round


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes ``[start, stop)`` of a tensor, in one block and on one rank."""

    tensor: int  # number of the tensor in the checkpoint
    start: int
    stop: int
    rank: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Batch:
    """The segments of a file that one rank sends in a round, in the order of their bytes."""

    file: File | None  # None after the last file
    segments: Sequence[_Segment] = ()


def upload(folder: Folder, job: WriteJob, ranks: Coordinator, token: str) -> list[BlockPart]:
    """Send all files of ``job`` except the manifest; return the checksums of this rank's bytes.

    A rank that sends one first checks that ``folder`` has the marker with ``token``. An error is
    raised on all ranks, after every upload has been discarded.
    """
    holders = _holders(job.slices, ranks)
    assigned = assign_files(job.files, ranks.size)
    num_files = max(1, sum(map(bool, assigned)))  # in a round
    max_bytes = max(_MIN_BYTES, 1 << (ROUND_BYTES // num_files).bit_length() - 1)
    streams = [
        chain.from_iterable(
            _batches(file, _segments(job.numbers[file.name], holders, max_bytes), max_bytes)
            for file in files
        )
        for files in assigned
    ]
    uploads = _Uploads(folder, token)
    try:
        return _send(zip_longest(*streams, fillvalue=_Batch(None)), job, uploads, ranks)
    except BaseException as error:
        uploads.discard()
        # All uploads must end before rank 0 removes the files. A lost rank cannot be waited for.
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


class _Uploads:
    """Sends this rank's files one after the other; a file appears once it is closed."""

    def __init__(self, folder: Folder, token: str) -> None:
        self.folder = folder
        self._token = token
        self._file: File | None = None
        self._stream: Any = None  # to the store

    def write(self, file: File | None, contents: Iterable[memoryview]) -> None:
        """Append to ``file`` after closing the previous one."""
        if file is not self._file:
            self._next(file)
        if file is not None:
            with errors_at(self.folder / file.name):
                for content in contents:
                    self._stream.write(content)

    def discard(self) -> None:
        """Abort the upload. Stores that cannot abort keep a partial file, removed later."""
        # Without `close`, the garbage collector would close the stream at an unknown time.
        for method in ("discard", "close"):
            with contextlib.suppress(Exception):
                getattr(self._stream, method)()

    def _next(self, file: File | None) -> None:
        if self._file is not None:
            with errors_at(self.folder / self._file.name):
                self._stream.close()
        is_first = self._file is None
        self._file, self._stream = file, None
        if file is not None:
            if is_first:
                check_shared(self.folder, self._token)
            target = self.folder / file.name
            part_bytes = max(PART_BYTES, -(-file.num_bytes // _MAX_PARTS))
            with errors_at(target):
                self._stream = self.folder.store.open(target.path, "wb", block_size=part_bytes)
                self._stream.write(file.head)


def _send(
    rounds: Iterable[Sequence[_Batch]], job: WriteJob, uploads: _Uploads, ranks: Coordinator
) -> list[BlockPart]:
    """Send ``rounds``, in each of which every rank sends the batch at its own index."""
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
    sizes = [0] * num_ranks
    for segment in batch.segments:
        sizes[segment.rank] += segment.num_bytes
    return sizes


def _in_order(batch: _Batch, received: Iterable[Tensor]) -> Iterator[memoryview]:
    """The contents of a batch in order, from the bytes ``received`` from each rank."""
    remaining = [bytes_of(content) for content in received]
    for segment in batch.segments:
        yield remaining[segment.rank][: segment.num_bytes]
        remaining[segment.rank] = remaining[segment.rank][segment.num_bytes :]


_Holders = Mapping[int, Sequence[tuple[int, int, int]]]


def _holders(own: Slices, ranks: Coordinator) -> _Holders:
    """The bytes that ranks hold of each tensor, as ``(start, stop, rank)`` in ascending order."""
    rows = [(number, held.start_byte, held.stop_byte) for number, held in own.items()]
    holders: dict[int, list[tuple[int, int, int]]] = {}
    for rank, rows_of_rank in enumerate(ranks.all_gather_rows(rows, 3)):
        for number, start, stop in rows_of_rank.tolist():
            if start < stop:
                holders.setdefault(number, []).append((start, stop, rank))
    return {number: sorted(found) for number, found in holders.items()}


def _segments(tensors: Iterable[int], holders: _Holders, max_bytes: int) -> Iterator[_Segment]:
    size = min(max_bytes, BLOCK_BYTES)  # both are powers of two
    for number in tensors:
        for start, stop, rank in holders.get(number, ()):
            for begin, end in split_at_blocks(start, stop, size):
                yield _Segment(number, begin, end, rank)


def _batches(file: File, segments: Iterable[_Segment], max_bytes: int) -> Iterator[_Batch]:
    """The batches of a file; at least one, even if no tensor of the file has elements."""
    groups = in_groups(segments, lambda segment: segment.num_bytes, max_bytes)
    yield _Batch(file, next(groups, ()))
    yield from (_Batch(file, group) for group in groups)
