"""Parameters that change between a forward and its backward, which no gradient would be right for.

Autograd compares versions of the tensors that it saved. Those are the gathered parameters here,
which get new memory and the version of the old in each gather, so the shards are compared instead.
"""

from collections.abc import Sequence

from shardwise.errors import StepError
from shardwise.runtime.unit import Unit
from shardwise.schedule.sequencer import Call

__all__ = ["ShardVersions"]


class ShardVersions:
    """When the shards of each unit were last seen to have changed, by the sequencer's ticks."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._versions = [_versions_of(unit) for unit in units]
        self._changed: dict[int, tuple[int, str]] = {}  # unit to tick and names of parameters

    def update(self, tick: int) -> list[int]:
        """Look for changes since the last call; returns the units that have any."""
        changed = []
        for index, unit in enumerate(self._units):
            before, after = self._versions[index], _versions_of(unit)
            if before != after:
                self._versions[index] = after
                pairs = zip(unit.parameters, before, after, strict=True)
                self.note(index, tick, [parameter.name for parameter, b, a in pairs if b != a])
                changed.append(index)
        return changed

    def note(self, unit: int, tick: int, names: Sequence[str]) -> None:
        """Parameters changed in a way that their versions do not show."""
        self._changed[unit] = tick, ", ".join(names)

    def check(self, call: Call, *, steps_in_backward: bool) -> None:
        """Raise a StepError if parameters have changed since ``call``, whose backward begins."""
        tick, names = self._changed.get(call.unit, (-1, ""))
        if call.entered > tick:
            return
        way_out = (
            "sw.optimizer_in_backward steps in the first backward that reduces gradients; call "
            "set_requires_gradient_sync(False) before all backwards of a step but the last"
            if steps_in_backward
            else "run the backward of a forward before the optimizer's step"
        )
        raise StepError(
            f"{names}: changed between a forward of {self._units[call.unit].plan.label} and its "
            f"backward, so the gradient would match neither value; {way_out}"
        )


def _versions_of(unit: Unit) -> list[tuple[int, int]]:
    return [(p.sharded._version, p.local._version) for p in unit.parameters]
