"""The words in which a step is told: what the plan foresees and what the ledger records."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Event", "EventKind"]


class EventKind(StrEnum):
    """What can happen to a unit in a step."""

    GATHER = "gather"  # its all-gather is launched
    WAIT = "wait"  # compute waits until its parameters are whole
    FORWARD = "forward"  # its forward begins
    BACKWARD = "backward"  # its backward begins
    FREE = "free"  # its gathered parameters are dropped
    KEEP = "keep"  # a part for the gathers of a smaller group is kept, or gathered for them
    DROP = "drop"  # that part is dropped
    REDUCE = "reduce"  # the reduce-scatter of its gradients is launched
    COLLECT = "collect"  # its reduced gradients are waited for and handed to the parameters
    STEP = "step"  # the optimizer updates its parameters, in backward, and its gradients are freed


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to one unit.

    ``bytes`` is the size of the flat buffer that the event gathers, frees, reduces or hands over,
    and of the gradients that a step frees; 0 for compute and waits.
    """

    kind: EventKind
    unit: str
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} {self.unit}"
