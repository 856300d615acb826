"""Which replicas were there in each step that counts, and what it cost that others were not."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardwise.plan.spelling import counted

__all__ = ["Attendance", "Change", "changes_of_replicas"]

_TYPICAL = 20  # steps, whose median duration is that of an undisturbed step
_MOMENT_SECONDS = 1.0  # longer waits for a quorum are told


@dataclass(frozen=True)
class Change:
    """What was different in a step that counts. The metrics of the step have the same names.

    Attributes:
        left: numbers of the other replicas that were there in the step before, and no longer are.
        joined: numbers of those that are there again; they may take a state in this step.
        repeats: how many times the step had not counted before.
        waited_seconds: how long the replica waited for a quorum; 0.0 if only for a moment.
        lost_seconds: how much longer the step took in this replica than the steps before.
    """

    left: Sequence[int] = ()
    joined: Sequence[int] = ()
    repeats: int = 0
    waited_seconds: float = 0.0
    lost_seconds: float = 0.0

    def __str__(self) -> str:
        return self.told([f"replica {number} joined" for number in self.joined])

    def told(self, joined: Iterable[str]) -> str:
        """In words, with those for the replicas that have ``joined``."""
        words = [f"replica {number} left" for number in self.left]
        words += joined
        if self.repeats:
            words.append(f"repeated {'once' if self.repeats == 1 else f'{self.repeats} times'}")
        if self.waited_seconds:
            waited = f"waited {self.waited_seconds:.1f} s"
            words.append(f"{waited} for the lighthouse and other replicas")
        return f"{', '.join(words)}; {self.lost_seconds:.1f} s lost"


class Attendance:
    """The replicas and the durations of steps, in one replica.

    A step begins with its first attempt or, if it ``is_continuous``, where the one before ended.

    Attributes:
        members: numbers of the replicas that were there in the last step that counts.
        num_replicas: the number of those whose values counted.
        change: what was different in it from the step before.
        seconds: duration of all steps that count.
        attempts: of the step that has not been decided yet.
        useful_seconds: the same without lost seconds, added up over the replicas that counted.
    """

    def __init__(self, *, is_continuous: bool) -> None:
        self.members: set[int] = set()
        self.num_replicas = 0
        self.change: Change | None = None
        self.seconds = self.useful_seconds = 0.0
        self._is_continuous = is_continuous
        self._undisturbed: deque[float] = deque(maxlen=_TYPICAL)  # durations
        self._began = time.monotonic()
        self.attempts, self._waited = 0, 0.0

    def begin(self) -> None:
        """Note an attempt of a step."""
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


def changes_of_replicas(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each step in which replicas left, came back or repeated, and a last one for all.

    ``records`` are the metrics of the steps. Those of a run without replicas give no lines.
    """
    lines: list[str] = []
    changes: list[Change] = []
    away: dict[int, Mapping[str, Any]] = {}  # by the number of a replica, the step without it
    last = None
    for record in records:
        last = record if "goodput" in record else last
        if "lost_seconds" not in record:
            continue
        names = (field.name for field in fields(Change))
        change = Change(**{name: record[name] for name in names if name in record})
        changes.append(change)
        away.update(dict.fromkeys(change.left, record))
        joined = [_joined(number, record, away.pop(number, None)) for number in change.joined]
        lines.append(f"step {record['step']}: {change.told(joined)}")
    if last is None:
        return []
    num_left = sum(len(change.left) for change in changes)
    num_joined = sum(len(change.joined) for change in changes)
    repeats = sum(change.repeats for change in changes)
    lost = sum(change.lost_seconds for change in changes)
    total = f"replicas: {num_left} left, {num_joined} joined; {lost:.1f} s and "
    total += f"{counted(repeats, 'repeated step')} lost; goodput {last['goodput']:.1%}"
    return [*lines, total]


def _joined(number: int, record: Mapping[str, Any], left: Mapping[str, Any] | None) -> str:
    if left is None:
        return f"replica {number} joined"
    steps = counted(record["step"] - left["step"], "step")
    return f"replica {number} came back after {steps}, {record['seconds'] - left['seconds']:.0f} s"
