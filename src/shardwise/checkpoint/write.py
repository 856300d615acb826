"""From shares in memory to a complete checkpoint on disk; may run beside the training."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint import crc
from shardwise.checkpoint.crc import Part, block_sums
from shardwise.checkpoint.directory import (
    Owner,
    Retention,
    commit,
    is_owned,
    prepare,
    release,
    remove_remains,
)
from shardwise.checkpoint.files import File, index_of
from shardwise.checkpoint.manifest import Component, Manifest, tensor_ids
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.remote import Remote
from shardwise.checkpoint.shares import Share, bytes_of
from shardwise.checkpoint.storage import Folder
from shardwise.checkpoint.upload import upload
from shardwise.errors import CheckpointError, StepError

__all__ = ["Task", "write"]

_BEGIN_BYTES = 8 << 20  # with 1 MiB, or with 32, saves took as long or longer


@dataclass(frozen=True)
class Task:
    """All that is needed to write."""

    directory: Folder
    components: Mapping[str, Component]
    shares: Mapping[str, Mapping[str, Share]]  # by component and tensor: what this rank writes
    retention: Retention | None

    @property
    def others(self) -> dict[str, bytes]:
        """Whole files beside the safetensors: the indices of what was split."""
        return {
            f"{name}.safetensors.index.json": index_of(part.files)
            for name, part in self.components.items()
            if len(part.files) > 1
        }


def write(task: Task, peers: Peers) -> None:
    """All ranks write their shares; an error on one of them is one on all.

    Raises:
        CheckpointError: what was written is removed, as far as that goes.
    """
    owner: Owner | None = None  # on rank 0
    try:
        with peers.together("prepare the directory"):
            if peers.rank == 0:
                owner = prepare(task.directory)
        if isinstance(task.directory, Remote):
            own = upload(task.directory, task.components, task.shares, task.others, peers)
        else:
            own = _write_in_place(task, peers)
        parts = [part for told in peers.exchange(crc.encode(own)) for part in crc.decode(told)]
        with peers.together("complete the checkpoint"):
            if owner is not None:
                commit(task.directory, _manifest(task, parts).render(), owner)
    except StepError:  # other ranks may still be writing
        raise
    except Exception:
        with contextlib.suppress(OSError, CheckpointError):  # for the same reason, perhaps
            if owner is not None and is_owned(task.directory, owner):
                remove_remains(task.directory)
        raise
    finally:
        if owner is not None:
            release(owner)
    with peers.together("remove older checkpoints; the new one is complete"):
        if peers.rank == 0 and task.retention is not None:
            task.retention.apply(task.directory)


def _write_in_place(task: Task, peers: Peers) -> list[Part]:
    """All ranks write into the same files; the checksums of what this one wrote."""
    with peers.together("write"):
        path = Path(str(task.directory))
        own = _write_shares(path, task, peers)
        if peers.rank == 0:
            _write_others(path, task)
        return own


def _write_shares(path: Path, task: Task, peers: Peers) -> list[Part]:
    """Write this rank's bytes, bring them to disk, and return their checksums."""
    numbered = tensor_ids(task.components)
    parts: list[Part] = []
    with contextlib.ExitStack() as files:
        for name, file in _in_turn(task.components, peers):
            found = {spec.name: task.shares[name].get(spec.name) for spec in file.specs}
            shares = {key: share for key, share in found.items() if share is not None}
            if not shares:
                continue
            disk = _Disk(files.enter_context(_opened(path / file.name)))
            for key, share in shares.items():
                parts += _write_share(disk, file.offsets[key], share, numbered[name, key])
            disk.begin()
    return parts  # all of them are on disk


def _in_turn(components: Mapping[str, Component], peers: Peers) -> list[tuple[str, File]]:
    """The files of all components, for each rank from another one on.

    A file takes the bytes of one rank at a time: two that begin with the same wait for each other.
    """
    files = [(name, file) for name, part in components.items() for file in part.files]
    first = peers.rank * len(files) // peers.size
    return files[first:] + files[:first]


def _write_share(disk: "_Disk", offset: int, share: Share, number: int) -> Iterator[Part]:
    """Write it block by block: a block is in the processor's cache when it is copied."""
    elements, start = share.elements, share.start_byte
    itemsize = elements.itemsize
    here = bytes_of(elements) if elements.device.type == "cpu" else None
    for begin, end in crc.blocks(start, share.stop_byte):
        if here is None:
            content = bytes_of(elements[(begin - start) // itemsize : (end - start) // itemsize])
        else:
            content = here[begin - start : end - start]
        yield Part(number, begin, end, crc.crc32(content))
        disk.write(content, offset + begin)


class _Disk:
    """An open file whose bytes are on their way to disk while more are written.

    Left alone the system begins much later, and then makes whoever writes wait. fdatasync would
    begin at once, but what it waits for holds up the writing, too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[tuple[int, int]] = []  # offset, bytes
        self._waiting_bytes = 0

    def write(self, content: memoryview, offset: int) -> None:
        _write_at(self._descriptor, content, offset)
        self._waiting.append((offset, content.nbytes))
        self._waiting_bytes += content.nbytes
        if self._waiting_bytes >= _BEGIN_BYTES:
            self.begin()

    def begin(self) -> None:
        """Let the disk have what was written, and do not wait; errors are told by fsync."""
        for offset, num_bytes in self._waiting:
            # Linux drops what is on disk already, and begins to write what is not: these are not.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        self._waiting, self._waiting_bytes = [], 0


def _write_others(path: Path, task: Task) -> None:
    """The beginnings of files, and those that are not made of tensors."""
    for component in task.components.values():
        for file in component.files:
            with _opened(path / file.name) as descriptor:
                _write_at(descriptor, memoryview(file.head), 0)
    for name, content in task.others.items():
        with _opened(path / name) as descriptor:
            _write_at(descriptor, memoryview(content), 0)


def _manifest(task: Task, parts: list[Part]) -> Manifest:
    by_tensor: dict[int, list[Part]] = {}
    for part in parts:
        by_tensor.setdefault(part.tensor, []).append(part)
    numbered = tensor_ids(task.components)
    sums: dict[str, dict[str, list[int]]] = {}
    for name, component in task.components.items():
        sums[name] = {}
        for key, spec in component.specs.items():
            found = block_sums(by_tensor.get(numbered[name, key], ()), spec.num_bytes)
            whole = [one for one in found if one is not None]
            assert len(whole) == len(found), f"{key}: the ranks did not write all of it"
            sums[name][key] = whole
    others = {name: (len(content), crc.crc32(content)) for name, content in task.others.items()}
    return Manifest(task.components, sums, others)


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file that other ranks write to as well; on disk at the end of the block.

    Raises:
        OSError: with the path in it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
