"""Memory of units that the optimizer steps on the device, with shards and states on the host."""

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.states import stepped_bytes
from shardwise.plan.offload import MAX_STEPPED_UNITS, SteppedUnits
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
        self._on_device: SteppedUnits[int] = SteppedUnits(drop=id)
        self._steps_in_backward = configuration.step_in_backward
        sizes = [size for size in self._sizes if size] * (not self._steps_in_backward)
        windows = (sizes[i : i + MAX_STEPPED_UNITS] for i in range(len(sizes)))
        self.update_bytes = max(map(sum, windows), default=0)

    @property
    def allocated(self) -> int:
        """Bytes on the device now, in a backward that steps units."""
        return sum(self._sizes[index] for index in self._on_device)

    def apply(self, event: Event) -> None:
        """Copy or step a unit, if units are stepped in backward."""
        index = event.unit
        if not self._steps_in_backward or not self._sizes[index]:
            return
        units = self._on_device
        if event.kind is EventKind.REDUCE and units.takes_ahead(index):
            units.make_room()
            units.ahead[index] = index
        elif event.kind is EventKind.STEP:
            if units.ahead.pop(index, None) is None:
                units.make_room()
            units.leaving.append(index)

    def finish(self) -> None:
        """End the backward."""
        self._on_device.clear()
