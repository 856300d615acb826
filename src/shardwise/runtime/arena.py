"""One piece of memory for all that a step takes and gives back, at places that are known ahead.

Blocks of unlike sizes cannot stand in for each other, so a pool of blocks that is bounded by what
was once in use at the same time has to free and allocate in every step. Ranges of one piece can.
"""

import torch
from torch.utils.dlpack import from_dlpack

from shardwise.schedule.memory import Placement, Span, place

__all__ = ["Arena", "Course", "aligned"]

# What a course takes, in order, and from when until when: by that it is known again.
_Spans = tuple[tuple[int, int, int], ...]

ALIGNMENT = 64  # bytes: a line of the cache, and what vector loads want
_MOST_SPANS = 1 << 14  # of a course that is planned
_MOST_PLANS = 8
_MOST_FOLLOWERS = 64  # what never repeats is not worth its memory


class Arena:
    """Memory of which ranges are lent.

    Args:
        whole: the memory.
    """

    def __init__(self, whole: torch.UntypedStorage) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole)
        self._lent: dict[int, int] = {}  # bytes, by place
        self._ranges: dict[tuple[int, int], torch.UntypedStorage] = {}  # by place and size

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is lent."""
        return not self._lent

    @property
    def idle_storages(self) -> list[torch.UntypedStorage]:
        """The whole of it, and ranges that are not lent."""
        ranges = self._ranges.values()
        return [self._bytes.untyped_storage(), *(s for s in ranges if not self.owns(s))]

    def take(self, num_bytes: int, place: int | None) -> torch.UntypedStorage | None:
        """``num_bytes`` at ``place`` if they are free, or wherever they are; None: nowhere."""
        if place is None or not self._is_free(place, num_bytes):
            place = self._first_free(num_bytes)
        if place is None:
            return None
        self._lent[place] = num_bytes
        if (place, num_bytes) not in self._ranges:
            # The public way to a Storage of its own over a part of another, which it keeps alive.
            part = from_dlpack(self._bytes[place : place + num_bytes])
            self._ranges[place, num_bytes] = part.untyped_storage()
        return self._ranges[place, num_bytes]

    def give(self, storage: torch.UntypedStorage) -> None:
        del self._lent[storage.data_ptr() - self._bytes.data_ptr()]

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is a range that is lent."""
        num_bytes = self._lent.get(storage.data_ptr() - self._bytes.data_ptr())
        return num_bytes is not None and num_bytes == storage.nbytes()

    def _is_free(self, start: int, size: int) -> bool:
        stop = start + size
        lent = self._lent.items()
        return stop <= self.num_bytes and all(
            stop <= begin or begin + other <= start for begin, other in lent
        )

    def _first_free(self, size: int) -> int | None:
        at = 0
        for start, other in sorted(self._lent.items()):
            if start - at >= size:
                return at
            at = start + other
        return at if at + size <= self.num_bytes else None


class Course:
    """What is taken and given back from one moment at which nothing is lent to the next.

    A step is one course, or a forward without gradients. What follows two courses is taken to be
    what followed these two the last time, and then has the places that were planned for that.
    """

    def __init__(self) -> None:
        self._planned: dict[_Spans, Placement] = {}
        self._followers: dict[tuple[_Spans, _Spans], _Spans] = {}
        self._last: tuple[_Spans, _Spans] = ((), ())
        self._expected: _Spans = ()
        self._placement: Placement | None = None  # of what is expected
        self._begin()

    def next_place(self, num_bytes: int) -> int | None:
        """Where the plan has what is asked for now, if it is what was expected."""
        position, expected = len(self._sizes), self._expected
        self._is_expected &= position < len(expected) and expected[position][0] == num_bytes
        if not self._is_expected or self._placement is None:
            return None
        return self._placement.offsets[position]

    def note_taken(self, num_bytes: int, storage: torch.UntypedStorage) -> None:
        self._lent[storage.data_ptr()] = len(self._sizes)
        self._sizes.append(num_bytes)
        self._starts.append(self._next_tick())
        self._stops.append(-1)

    def note_given(self, storage: torch.UntypedStorage) -> None:
        self._stops[self._lent.pop(storage.data_ptr())] = self._next_tick()

    def end(self, *, plan: bool) -> Placement | None:
        """Nothing is lent: expect what comes next; with ``plan``, find places for what was."""
        done = tuple(zip(self._sizes, self._starts, self._stops, strict=True))
        if plan and done not in self._planned and len(done) <= _MOST_SPANS:
            if len(self._planned) == _MOST_PLANS:
                self._planned.pop(next(iter(self._planned)))
            self._planned[done] = place([Span(*span) for span in done])
        if len(self._followers) == _MOST_FOLLOWERS:
            self._followers.clear()
        # One without a plan of its own found room with what was expected, so expect that again.
        self._followers[self._last] = done if done in self._planned else self._expected
        self._last = (self._last[1], done)
        hardest = next(reversed(self._planned), done)  # others may do without a plan
        self._expected = self._followers.get(self._last, hardest)
        self._placement = self._planned.get(self._expected)
        self._begin()
        return self._planned.get(done)

    def _begin(self) -> None:
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._lent: dict[int, int] = {}  # positions by address
        self._tick = 0
        self._is_expected = True

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def aligned(num_bytes: int) -> int:
    """``num_bytes``, rounded up."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
