"""What happens to a unit in a step: predicted by `forecast.time.replay`, recorded by the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["COMPUTE", "COPIES", "GATHERS", "WAITS", "Event", "EventKind", "describe"]


class EventKind(StrEnum):
    """What can happen to a unit in a step."""

    GATHER = "gather"  # launch the all-gather of its parameters
    WAIT = "wait"  # make compute wait for the gather
    FORWARD = "forward"  # begin its forward
    BACKWARD = "backward"  # begin its backward
    FREE = "free"  # free its gathered parameters
    RESHARD_TO_SUBGROUP = "reshard_to_subgroup"  # keep, or gather, its shard within a subgroup
    FREE_SUBGROUP = "free_subgroup"  # free its shard within a subgroup
    REDUCE = "reduce"  # launch the reduce-scatter of its gradients
    FINISH_REDUCE = "finish_reduce"  # wait for the reduction and set the parameters' gradients
    STEP = "step"  # in backward: the optimizer updates its parameters; free its gradients
    # With CPUOffloadPolicy(step="device"): copy its shards and optimizer states for their step.
    STATES_TO_DEVICE = "states_to_device"
    STATES_TO_HOST = "states_to_host"


COMPUTE = (EventKind.FORWARD, EventKind.BACKWARD)
GATHERS = (EventKind.GATHER, EventKind.RESHARD_TO_SUBGROUP)
WAITS = (EventKind.WAIT, EventKind.FINISH_REDUCE)  # compute waits for communication
COPIES = (EventKind.STATES_TO_DEVICE, EventKind.STATES_TO_HOST)
_FREES = (EventKind.FREE, EventKind.FREE_SUBGROUP)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to one unit, given by its index in the plan.

    ``bytes`` is the size of the buffer that the event gathers, frees or reduces, or of the
    gradient shards that a reduction or a step finishes; 0 for compute and waits.
    """

    kind: EventKind
    unit: int
    bytes: int = 0

    @property
    def gathered_change(self) -> int:
        """The change in the bytes of gathered units."""
        if self.kind in GATHERS:
            return self.bytes
        return -self.bytes if self.kind in _FREES else 0


def describe(event: Event, labels: Sequence[str]) -> str:
    """Format ``event`` as in ``gather layers.0``; ``labels`` are those of the plan's units."""
    return f"{event.kind.value} {labels[event.unit]}"
