"""Which units are on the device while the optimizer steps them there, one after the other."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["MAX_STEPPED_UNITS", "SteppedUnits"]

# On the device at a time with step="device": one arrives, one is stepped, one leaves.
MAX_STEPPED_UNITS = 3

_T = TypeVar("_T")


class SteppedUnits(Generic[_T]):
    """The units on the device with ``step="device"``, at most `MAX_STEPPED_UNITS` at a time.

    Attributes:
        ahead: those that were copied there before their step, by index.
        leaving: those that have stepped and are copied to the host, the oldest first.
    """

    def __init__(self, drop: Callable[[_T], object]) -> None:
        self.ahead: dict[int, _T] = {}
        self.leaving: deque[_T] = deque()
        self._drop = drop

    def __iter__(self) -> Iterator[_T]:
        yield from self.ahead.values()
        yield from self.leaving

    def takes_ahead(self, index: int, *, others: int = 0) -> bool:
        """Whether to copy a unit before its step; ``others`` units are stepping."""
        return index not in self.ahead and len(self.ahead) + others + 1 < MAX_STEPPED_UNITS

    def make_room(self, *, others: int = 0) -> None:
        """Drop units that leave, so that another one may come."""
        while self.leaving and len(self.ahead) + len(self.leaving) + others >= MAX_STEPPED_UNITS:
            self._drop(self.leaving.popleft())

    def clear(self) -> None:
        self.ahead.clear()
        self.leaving.clear()
