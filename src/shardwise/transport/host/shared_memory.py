"""Memory that ranks of one host have in common: what they gather is there once, not once a rank.

Every rank takes a place for what it gathers in a file that has no name and lies in memory; others
open it through ``/proc``. If all that gather a unit find that they have the same buffers in use,
all compute in the place of the first of them: each writes its shard there, and nothing is read from
anybody. The other places are not touched, so they take no memory.

A place is written to only then. That all have come means that nobody uses what was there before:
what the first rank has given back, all have. If they find otherwise, as when an exception has freed
on one rank what another one still uses, each gathers in memory of its own.
"""

import contextlib
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "DISAGREES",
    "SharedMemory",
    "SharedRange",
    "is_offered",
    "is_place",
    "offer_secret",
    "shares",
]

_MOST_SEGMENTS = 16  # each takes two descriptors, of which a process may have 1024
_WORD = struct.Struct("<qqqqq")  # descriptor, number and oldest number of segments, offset, in use
_NOWHERE = (-1, 0, 0, 0)
DISAGREES = _WORD.pack(*_NOWHERE, -1)  # with everybody


def _can_offer() -> bool:
    try:
        os.close(os.memfd_create("shardwise-try"))
    except (AttributeError, OSError):  # another system, or one that does not permit it
        return False
    return Path("/proc/self/fd").is_dir()


is_offered = _can_offer()  # whether another process can open it has to be tried


@dataclass(frozen=True, slots=True)
class SharedRange:
    """The place that a rank has taken for what it is about to gather."""

    message: bytes  # where that is, and what else is in use
    move: Callable[[int, bytes], None]  # to the place that a process has told of
    use_private_memory: Callable[[], None]  # to memory that nobody else uses

    def agrees(self, word: bytes) -> bool:
        """Whether another rank has the same in use."""
        return bool(_WORD.unpack(self.message)[-1] == _WORD.unpack(word)[-1])


def is_place(word: bytes) -> bool:
    """Whether it tells of memory that others can open."""
    return bool(_WORD.unpack(word)[0] >= 0)


class _Segment(mmap.mmap):
    """A file in memory, and a descriptor by which other processes open it."""

    descriptor: int
    number: int


def _make_segment(num_bytes: int) -> _Segment:
    descriptor = os.memfd_create("shardwise")
    try:
        os.ftruncate(descriptor, num_bytes)
        segment = _Segment(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    segment.descriptor = descriptor
    weakref.finalize(segment, os.close, descriptor)
    return segment


class SharedMemory:
    """Memory of this process that others may compute in, and theirs that this one does."""

    def __init__(self) -> None:
        self._num_segments = 0
        self._own: weakref.WeakValueDictionary[int, _Segment] = weakref.WeakValueDictionary()
        self._opened: dict[tuple[int, int], mmap.mmap] = {}  # by process and number

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Memory that is taken where it is written to; after some, for this process alone."""
        segment: _Segment | None = None
        if len(self._own) < _MOST_SEGMENTS:
            with contextlib.suppress(OSError):  # too many open files
                segment = _make_segment(num_bytes)
        if segment is None:
            return torch.UntypedStorage(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
        self._num_segments += 1
        segment.number = self._num_segments
        storage = _storage(segment, 0, num_bytes)
        self._own[storage.data_ptr()] = segment
        return storage

    def message(self, address: int, in_use: int) -> bytes:
        """Tell others of a place in memory of `allocate`, and what else is in use here."""
        segments = dict(self._own)
        start = max((start for start in segments if start <= address), default=0)
        if not start or address >= start + len(segments[start]):
            return _WORD.pack(*_NOWHERE, in_use)
        oldest = min(segment.number for segment in segments.values())
        segment = segments[start]
        return _WORD.pack(segment.descriptor, segment.number, oldest, address - start, in_use)

    def open(self, process: int, word: bytes, num_bytes: int) -> torch.UntypedStorage:
        """The place of which another process tells.

        Raises:
            OSError: it is gone.
        """
        descriptor, number, oldest, offset, _ = _WORD.unpack(word)
        key = process, number
        memory = self._opened.pop(key, None)
        if memory is None:
            self._forget(process, oldest)
            opened = os.open(_path(process, descriptor), os.O_RDWR)
            try:
                memory = mmap.mmap(opened, 0)
            finally:
                os.close(opened)
        self._opened[key] = memory  # the last one
        return _storage(memory, offset, num_bytes)

    def _forget(self, process: int, oldest: int) -> None:
        """What that process has freed, as far as it tells, and what was not used for long."""
        for key in [one for one in self._opened if one[0] == process and one[1] < oldest]:
            del self._opened[key]
        if len(self._opened) >= _MOST_SEGMENTS:
            del self._opened[next(iter(self._opened))]


def offer_secret(secret: bytes) -> int:
    """A descriptor by which others can open the secret if they `share`; -1: nobody can."""
    if not is_offered:
        return -1
    descriptor = os.memfd_create("shardwise-secret")
    os.write(descriptor, secret)
    return descriptor


def shares(process: int, descriptor: int, secret: bytes) -> bool:
    """Whether this process can open what that one has, and finds its secret there."""
    try:
        return _path(process, descriptor).read_bytes() == secret
    except OSError:
        return False


def _path(process: int, descriptor: int) -> Path:
    return Path(f"/proc/{process}/fd/{descriptor}")


def _storage(memory: mmap.mmap, offset: int, num_bytes: int) -> torch.UntypedStorage:
    """Memory that stays mapped for as long as it is used."""
    part = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes)
    return part.untyped_storage()
