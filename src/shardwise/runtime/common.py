"""Memory that ranks of one host have in common: what they gather is there once, not once a rank.

Every rank takes a place for what it gathers in a file that has no name and lies in memory; others
open it through ``/proc``. If all that gather a unit find that they have the same buffers in use,
all compute in the place of the first of them: each writes its shard there, and nothing is read from
anybody. The other places are not touched, so they take no memory.

A place is written to only then. That all have come means that nobody uses what was there before:
what the first rank has given back, all have. If they find otherwise, as when an exception has freed
on one rank what another one still uses, each gathers in memory of its own.
"""

import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DISAGREES", "Claim", "CommonMemory", "is_offered", "offer", "shares"]

_WORD = struct.Struct("<qqqqq")  # descriptor, number and oldest number of segments, offset, in use
DISAGREES = _WORD.pack(0, 0, 0, 0, -1)  # with everybody

# On which systems memory can be offered; whether another process can open it has to be tried.
is_offered = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


@dataclass(frozen=True, slots=True)
class Claim:
    """The place that a rank has taken for what it is about to gather."""

    word: bytes  # where that is, and what else is in use
    move: Callable[[int, bytes], None]  # to the place that a process has told of
    part: Callable[[], None]  # to memory that nobody else uses

    def agrees(self, word: bytes) -> bool:
        """Whether another rank has the same in use."""
        return bool(_WORD.unpack(self.word)[-1] == _WORD.unpack(word)[-1])


class _Segment(mmap.mmap):
    """A file in memory, and a descriptor by which other processes open it."""

    descriptor: int
    number: int


class CommonMemory:
    """Memory of this process that others may compute in, and theirs that this one does."""

    def __init__(self) -> None:
        self._num_segments = 0
        self._own: weakref.WeakValueDictionary[int, _Segment] = weakref.WeakValueDictionary()
        self._opened: dict[tuple[int, int], mmap.mmap] = {}  # by process and number

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Zeros; memory is taken where they are written to."""
        descriptor = os.memfd_create("shardwise")
        try:
            os.ftruncate(descriptor, num_bytes)
            segment = _Segment(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(segment, os.close, descriptor)
        storage = _storage(segment, 0, num_bytes)
        self._num_segments += 1
        segment.descriptor, segment.number = descriptor, self._num_segments
        self._own[storage.data_ptr()] = segment
        return storage

    def word(self, address: int, in_use: int) -> bytes:
        """Tell others of a place in memory of `allocate`, and what else is in use here."""
        segments = dict(self._own)
        start = max(start for start in segments if start <= address)
        oldest = min(segment.number for segment in segments.values())
        segment = segments[start]
        return _WORD.pack(segment.descriptor, segment.number, oldest, address - start, in_use)

    def open(self, process: int, word: bytes, num_bytes: int) -> torch.UntypedStorage:
        """The place of which another process tells.

        Raises:
            OSError: it is gone.
        """
        descriptor, number, oldest, offset, _ = _WORD.unpack(word)
        if (process, number) not in self._opened:
            old = [key for key in self._opened if key[0] == process and key[1] < oldest]
            for key in old:
                del self._opened[key]
            opened = os.open(_path(process, descriptor), os.O_RDWR)
            try:
                self._opened[process, number] = mmap.mmap(opened, 0)
            finally:
                os.close(opened)
        return _storage(self._opened[process, number], offset, num_bytes)


def offer(secret: bytes) -> int:
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
