"""Detects parameters that change between a forward and its backward.

Autograd compares the versions of tensors that it saved. Here it saved gathered parameters, whose
versions do not change when they are gathered again, so the versions of the shards are compared.
"""

from collections.abc import Iterable, Sequence

from shardwise.errors import StepError
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import Unit
from shardwise.schedule.sequencer import Call

__all__ = ["ShardVersions", "versions_of"]


class ShardVersions:
    """Records at which tick of the sequencer the shards of a unit were last found changed."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._versions = [_versions_in(unit) for unit in units]
        self._changed: dict[int, tuple[int, str]] = {}  # by unit: tick, names of parameters

    def update(self, tick: int, units: Iterable[int] | None = None) -> list[int]:
        """Look for changes of ``units``, or all, since the last look; return the changed ones."""
        changed = []
        for index in range(len(self._units)) if units is None else units:
            unit = self._units[index]
            before, after = self._versions[index], _versions_in(unit)
            if before != after:
                self._versions[index] = after
                pairs = zip(unit.parameters, before, after, strict=True)
                self.note(index, tick, [parameter.name for parameter, b, a in pairs if b != a])
                changed.append(index)
        return changed

    def note(self, unit: int, tick: int, names: Sequence[str]) -> None:
        """Record a change that versions do not show."""
        self._changed[unit] = tick, ", ".join(names)

    def check(self, call: Call, *, steps_in_backward: bool) -> None:
        """Raise a StepError if parameters have changed since ``call``, at its backward."""
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


def _versions_in(unit: Unit) -> list[tuple[int, int]]:
    return [versions_of(parameter) for parameter in unit.parameters]


def versions_of(parameter: FSDPParameter) -> tuple[int, int]:
    """Numbers that change when the shard of ``parameter`` does."""
    return parameter.sharded._version, parameter.local._version
