"""Write slices in memory as a complete checkpoint, possibly on a thread during training."""

import contextlib
import os
from collections.abc import Iterator

from shardwise.checkpoint.checksums import (
    BlockPart,
    block_sums,
    by_tensor,
    crc32,
    split_at_blocks,
)
from shardwise.checkpoint.collect import WriteJob
from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.directory import (
    Owner,
    check_shared,
    commit,
    is_owned,
    prepare,
    release,
    remove_remains,
)
from shardwise.checkpoint.format import File
from shardwise.checkpoint.manifest import Manifest, tensor_ids
from shardwise.checkpoint.slices import TensorSlice
from shardwise.checkpoint.stores import MAX_OPEN_FILES, LocalFolder, open_unlinked
from shardwise.checkpoint.upload import upload
from shardwise.errors import CheckpointError, StepError

__all__ = ["write"]

_FLUSH_BYTES = 8 << 20  # saves were not faster with 1 MiB or 32 MiB


def write(job: WriteJob, ranks: Coordinator) -> None:
    """Write the slices of all ranks; after an error, remove the files and raise it on all."""
    owner: Owner | None = None  # on rank 0
    try:
        with ranks.raises_together("prepare the directory"):
            if ranks.rank == 0:
                owner = prepare(job.folder)
        token = ranks.all_gather(owner.token.encode() if owner else b"")[0].decode()
        if isinstance(job.folder, LocalFolder):
            with ranks.raises_together("write"):
                check_shared(job.folder, token)
                own = _write_in_place(job.folder, job, ranks)
        else:
            own = upload(job.folder, job, ranks, token)
        by_rank = ranks.all_gather_rows(own, len(BlockPart._fields))
        with ranks.raises_together("complete the checkpoint"):
            if owner is not None:
                parts = [BlockPart(*row) for rows in by_rank for row in rows.tolist()]
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
