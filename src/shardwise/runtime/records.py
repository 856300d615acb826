"""Events with their times."""

from dataclasses import dataclass
from typing import SupportsFloat

from shardwise.plan.axes import NOTHING, AxisBytes
from shardwise.schedule.events import Event
from shardwise.transport.api import Work

__all__ = ["Record"]


@dataclass(slots=True)
class Record:
    """One event that took place.

    Times are seconds of `time.perf_counter`, of the stream that computes: floats, or events of a
    device that are converted to floats when they have taken place.
    """

    event: Event
    step: int
    began: SupportsFloat
    ended: SupportsFloat = 0.0
    works: tuple[Work, ...] = ()  # the communication that it launched
    sent: AxisBytes = NOTHING  # what this rank sends in it

    @property
    def seconds(self) -> float:
        """How long it took; for a wait, exposed communication."""
        return float(self.ended) - float(self.began)

    @property
    def busy_seconds(self) -> float:
        """How long the communication that it launched ran."""
        return sum(ended - began for began, ended in (work.span for work in self.works))
