"""Detects parameters that change between a forward and its backward, and steps without a change.

Autograd compares the versions of tensors that it saved. Here it saved gathered parameters, whose
versions do not change when they are gathered again, so the versions of the shards are compared.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor

from shardwise.errors import StepError
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import Unit
from shardwise.schedule.sequencer import Call

__all__ = ["CompleteStep", "ShardVersions"]


class ShardVersions:
    """Records at which tick of the sequencer the shards of a unit were last found changed."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._versions = [_versions_in(unit) for unit in units]
        self._changed: dict[int, tuple[int, str]] = {}  # by unit: tick, names of parameters

    def update(self, tick: int) -> list[int]:
        """Look for changes since the last call, and return the indices of changed units."""
        changed = []
        for index, unit in enumerate(self._units):
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


class CompleteStep:
    """The gradients of a step, which an optimizer or ``zero_grad()`` should use before the next."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._left = [
            (one, _versions_of(one), weakref.ref(gradient), gradient._version)
            for unit in units
            for one in unit.parameters
            if (gradient := one.sharded.grad) is not None
        ]

    def is_untouched(self) -> bool:
        """Whether all gradients are still there, and neither they nor parameters have changed."""
        return bool(self._left) and all(_is_same(*each) for each in self._left)


def _versions_in(unit: Unit) -> list[tuple[int, int]]:
    return [_versions_of(parameter) for parameter in unit.parameters]


def _versions_of(parameter: FSDPParameter) -> tuple[int, int]:
    return parameter.sharded._version, parameter.local._version


def _is_same(
    parameter: FSDPParameter,
    versions: tuple[int, int],
    before: weakref.ref[Tensor],
    version_before: int,
) -> bool:
    gradient = parameter.sharded.grad
    if gradient is None or gradient is not before():
        return False
    return _versions_of(parameter) == versions and gradient._version == version_before
