"""Memory of units that the optimizer steps on the device, with shards and states on the host."""

from collections import deque

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.states import stepped_bytes
from shardwise.plan.offload import MAX_STEPPED_UNITS
from shardwise.plan.plan import Plan
from shardwise.schedule.events import Event, EventKind

__all__ = ["DeviceStepReplay"]


class DeviceStepReplay:
    """Counts the bytes of shards and states as `features.device_step` copies them.

    Attributes:
        update_bytes: the most bytes if units are stepped after backward.
    """

    def __init__(self, plan: Plan, configuration: Configuration) -> None:
        self._sizes = [
            stepped_bytes(unit, configuration) if unit.steps_on_device else 0 for unit in plan.units
        ]
        self._ahead: set[int] = set()
        self._leaving: deque[int] = deque()
        self._steps_in_backward = configuration.step_in_backward
        sizes = [size for size in self._sizes if size] * (not self._steps_in_backward)
        windows = (sizes[i : i + MAX_STEPPED_UNITS] for i in range(len(sizes)))
        self.update_bytes = max(map(sum, windows), default=0)

    @property
    def allocated(self) -> int:
        """Bytes on the device now, in a backward that steps units."""
        return sum(self._sizes[index] for index in (*self._ahead, *self._leaving))

    def apply(self, event: Event) -> None:
        """Copy or step a unit, if units are stepped in backward."""
        index = event.unit
        if not self._steps_in_backward or not self._sizes[index]:
            return
        if event.kind is EventKind.REDUCE and index not in self._ahead:
            if len(self._ahead) + 1 < MAX_STEPPED_UNITS:
                self._make_room()
                self._ahead.add(index)
        elif event.kind is EventKind.STEP:
            if index not in self._ahead:
                self._make_room()
            self._ahead.discard(index)
            self._leaving.append(index)

    def finish(self) -> None:
        """End the backward."""
        self._ahead.clear()
        self._leaving.clear()

    def _make_room(self) -> None:
        while self._leaving and len(self._ahead) + len(self._leaving) >= MAX_STEPPED_UNITS:
            self._leaving.popleft()
