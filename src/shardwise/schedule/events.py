"""What happens to a unit in a step: predicted by `schedule`, recorded by the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["COMPUTE", "GATHERS", "WAITS", "Event", "EventKind", "describe"]


class EventKind(StrEnum):
    """What can happen to a unit in a step."""

    GATHER = "gather"  # launch the all-gather of its parameters
    WAIT = "wait"  # have compute wait for that
    FORWARD = "forward"  # begin its forward
    BACKWARD = "backward"  # begin its backward
    FREE = "free"  # free its gathered parameters
    RESHARD_TO_SUBGROUP = "reshard_to_subgroup"  # keep, or gather, its shard within a subgroup
    FREE_SUBGROUP = "free_subgroup"  # free that shard
    REDUCE = "reduce"  # launch the reduce-scatter of its gradients
    FINISH_REDUCE = "finish_reduce"  # wait for that and hand the gradients to the parameters
    STEP = "step"  # have the optimizer update its parameters, in backward, and free its gradients


COMPUTE = (EventKind.FORWARD, EventKind.BACKWARD)
GATHERS = (EventKind.GATHER, EventKind.RESHARD_TO_SUBGROUP)
WAITS = (EventKind.WAIT, EventKind.FINISH_REDUCE)  # of compute, for communication
_FREES = (EventKind.FREE, EventKind.FREE_SUBGROUP)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to one unit, given by its index in the plan.

    ``bytes`` is the size of the flat buffer that the event gathers, frees, reduces or hands over,
    and of the gradients that a step frees; 0 for compute and waits.
    """

    kind: EventKind
    unit: int
    bytes: int = 0

    @property
    def gathered_change(self) -> int:
        """By how much the bytes of gathered units change with it."""
        if self.kind in GATHERS:
            return self.bytes
        return -self.bytes if self.kind in _FREES else 0


def describe(event: Event, labels: Sequence[str]) -> str:
    """Such as ``gather layers.0``, where ``labels`` are those of the plan's units."""
    return f"{event.kind.value} {labels[event.unit]}"
