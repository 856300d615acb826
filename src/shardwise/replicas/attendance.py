"""Which replicas were there in each step that counts, and what it cost that others were not."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Attendance", "Change"]

_TYPICAL = 20  # steps, whose median duration is that of an undisturbed step
_MOMENT_SECONDS = 1.0  # longer waits for a quorum are told


@dataclass(frozen=True)
class Change:
    """What was different in a step that counts."""

    left: tuple[int, ...]  # numbers of the other replicas that are no longer there
    joined: tuple[int, ...]  # and of those that are there again, and may take a state
    repeats: int  # how many times the step had not counted before
    waited_seconds: float  # for a quorum; 0.0 if only for a moment
    lost_seconds: float  # how much longer the step took in this replica than those before

    def __str__(self) -> str:
        words = [
            f"{' and '.join(f'replica {number}' for number in numbers)} {verb}"
            for numbers, verb in ((self.left, "left"), (self.joined, "joined"))
            if numbers
        ]
        if self.repeats:
            words.append(f"repeated {'once' if self.repeats == 1 else f'{self.repeats} times'}")
        if self.waited_seconds:
            waited = f"waited {self.waited_seconds:.1f} s"
            words.append(f"{waited} for the lighthouse and other replicas")
        return f"{', '.join(words)}; {self.lost_seconds:.1f} s lost"


class Attendance:
    """The replicas and the durations of steps, in one replica.

    A step begins with its first attempt or, if it ``is_continuous``, where the one before ended.
    """

    def __init__(self, *, is_continuous: bool) -> None:
        self.members: set[int] = set()  # numbers of the replicas in the last step that counts
        self.num_replicas = 0  # those whose values counted
        self.change: Change | None = None  # what was different in it from the step before
        self.attempts = 0  # of the step that has not been decided yet
        self.seconds = 0.0  # duration of all steps that count
        self.useful_seconds = 0.0  # without lost ones, added up over the replicas that counted
        self._is_continuous = is_continuous
        self._undisturbed: deque[float] = deque(maxlen=_TYPICAL)  # durations
        self._began, self._waited = time.monotonic(), 0.0

    def begin(self) -> None:
        if not (self.attempts or self._is_continuous):
            self._began = time.monotonic()
        self.attempts += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note the time in the block as that of a wait for a quorum."""
        began = time.monotonic()
        yield
        self._waited += time.monotonic() - began

    def count(self, members: set[int], num_replicas: int) -> Change | None:
        """Note that the step counts; what was different in it, if anything."""
        seconds = time.monotonic() - self._began
        known = self.members or members  # in the first step, this replica has just come
        left, joined = tuple(sorted(known - members)), tuple(sorted(members - known))
        waited = self._waited if self._waited > _MOMENT_SECONDS and self.members else 0.0
        repeats, lost, self.change = self.attempts - 1, 0.0, None
        if left or joined or repeats or waited:
            usual = statistics.median(self._undisturbed) if self._undisturbed else seconds
            lost = max(0.0, seconds - usual)
            self.change = Change(left, joined, repeats, waited, lost)
        else:
            self._undisturbed.append(seconds)
        self.members, self.num_replicas = members, num_replicas
        self._began, self.attempts, self._waited = self._began + seconds, 0, 0.0
        self.seconds += seconds
        self.useful_seconds += (seconds - lost) * num_replicas
        return self.change
