"""Write slices in memory as a complete checkpoint, possibly on a thread during training."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.checksums import (
    BLOCK_BYTES,
    BlockPart,
    block_sums,
    by_tensor,
    crc32,
    decode_parts,
    encode_parts,
    split_at_blocks,
)
from shardwise.checkpoint.collect import WriteJob
from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.directory import Owner, commit, is_owned, prepare, release, remove_remains
from shardwise.checkpoint.format import File, in_groups
from shardwise.checkpoint.manifest import Manifest, tensor_ids
from shardwise.checkpoint.slices import Slices, TensorSlice, bytes_of
from shardwise.checkpoint.stores import (
    MAX_OPEN_FILES,
    Folder,
    LocalFolder,
    errors_at,
    open_unlinked,
)
from shardwise.errors import CheckpointError, StepError

__all__ = ["assign_files", "write"]

_FLUSH_BYTES = 8 << 20  # saves were not faster with 1 MiB or 32 MiB


def write(job: WriteJob, ranks: Coordinator) -> None:
    """Write the slices of all ranks; after an error, remove the files and raise it on all."""
    owner: Owner | None = None  # on rank 0
    try:
        with ranks.raises_together("prepare the directory"):
            if ranks.rank == 0:
                owner = prepare(job.folder)
        if isinstance(job.folder, LocalFolder):
            with ranks.raises_together("write"):
                own = _write_in_place(job.folder, job, ranks)
        else:
            own = upload(job.folder, job, ranks)
        encoded = ranks.all_gather(encode_parts(own))
        with ranks.raises_together("complete the checkpoint"):
            if owner is not None:
                parts = [part for each in encoded for part in decode_parts(each)]
                commit(job.folder, _manifest(job, parts).render(), owner)
    except StepError:  # other ranks may still be writing
        raise
    except Exception:
        with contextlib.suppress(OSError, CheckpointError):  # may fail for the same reason
            if owner is not None and is_owned(job.folder, owner):
                remove_remains(job.folder)
        raise
    finally:
        if owner is not None:
            release(owner)
    with ranks.raises_together("remove older checkpoints; the new one is complete"):
        if ranks.rank == 0 and job.retention is not None:
            job.retention.apply(job.folder)


def _manifest(job: WriteJob, parts: list[BlockPart]) -> Manifest:
    own = by_tensor(parts)
    ids = tensor_ids(job.components)
    sums: dict[str, dict[str, list[int]]] = {}
    for name, component in job.components.items():
        sums[name] = {}
        for key, spec in component.specs.items():
            found = block_sums(own.get(ids[name, key], ()), spec.num_bytes)
            known = [crc for crc in found if crc is not None]
            assert len(known) == len(found), f"{key}: the ranks did not write all of it"
            sums[name][key] = known
    others = {name: (len(content), crc32(content)) for name, content in job.others.items()}
    return Manifest(job.components, sums, others)


# -- local files ---------------------------------------------------------------------------------


def _write_in_place(folder: LocalFolder, job: WriteJob, ranks: Coordinator) -> list[BlockPart]:
    """Write this rank's bytes, sync them to disk, and return their checksums."""
    parts: list[BlockPart] = []
    files = _rotated(job.files, ranks)
    for first in range(0, len(files), MAX_OPEN_FILES):
        with contextlib.ExitStack() as opened:  # syncs them to disk when it closes
            for file in files[first : first + MAX_OPEN_FILES]:
                parts += _write_file(folder, file, job, ranks, opened)
    if ranks.rank == 0:
        for name, content in job.others.items():
            with _opened(folder, name) as descriptor:
                _write_at(descriptor, memoryview(content), 0)
    return parts


def _write_file(
    folder: LocalFolder, file: File, job: WriteJob, ranks: Coordinator, opened: contextlib.ExitStack
) -> list[BlockPart]:
    """Write this rank's slices to a file, which stays open; rank 0 also writes the header."""
    numbers = zip(file.offsets.values(), job.numbers[file.name], strict=True)
    own = [(offset, number) for offset, number in numbers if number in job.slices]
    if not own and ranks.rank != 0:
        return []
    output = _FlushedFile(opened.enter_context(_opened(folder, file.name)))
    if ranks.rank == 0:
        output.write(memoryview(file.head), 0)
    parts: list[BlockPart] = []
    for offset, number in own:
        parts += _write_slice(output, offset, job.slices[number], number)
    output.flush()
    return parts


def _rotated(files: list[File], ranks: Coordinator) -> list[File]:
    """``files``, rotated so that each rank starts with a different one.

    The operating system lets only one process at a time write to a file.
    """
    first = ranks.rank * len(files) // ranks.size
    return files[first:] + files[:first]


def _write_slice(
    output: "_FlushedFile", offset: int, own: TensorSlice, tensor: int
) -> Iterator[BlockPart]:
    """Write block by block, so that each block is in the processor's cache when it is copied."""
    for begin, end in split_at_blocks(own.start_byte, own.stop_byte):
        content = own.bytes_between(begin, end)
        yield BlockPart(tensor, begin, end, crc32(content))
        output.write(content, offset + begin)


class _FlushedFile:
    """An open file that is flushed to disk while more is written to it.

    By default the system starts flushing much later and then makes writers wait. fdatasync would
    start at once, but blocks the caller.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[tuple[int, int]] = []  # offset, bytes
        self._waiting_bytes = 0

    def write(self, content: memoryview, offset: int) -> None:
        _write_at(self._descriptor, content, offset)
        self._waiting.append((offset, content.nbytes))
        self._waiting_bytes += content.nbytes
        if self._waiting_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Start writing to disk without waiting; fsync reports errors."""
        for offset, num_bytes in self._waiting:
            # Linux drops the pages that are on disk and starts writing those that are not.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        self._waiting, self._waiting_bytes = [], 0


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


@contextlib.contextmanager
def _opened(folder: LocalFolder, name: str) -> Iterator[int]:
    """Open a file that other ranks also write to; it is synced to disk at the end of the block."""
    path = folder.target / name
    try:
        descriptor = open_unlinked(path, os.O_WRONLY | os.O_CREAT)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


# -- uploads ---------------------------------------------------------------------------------------


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


def upload(folder: Folder, job: WriteJob, ranks: Coordinator) -> list[BlockPart]:
    """Send all files of ``job`` except the manifest; return the checksums of this rank's bytes.

    An error is raised on all ranks, after every upload has been discarded.
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
    uploads = _Uploads(folder)
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

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
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
        self._file, self._stream = file, None
        if file is not None:
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
    for rank, encoded in enumerate(ranks.all_gather(np.array(rows, dtype=np.int64).tobytes())):
        for number, start, stop in np.frombuffer(encoded, dtype=np.int64).reshape(-1, 3).tolist():
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
