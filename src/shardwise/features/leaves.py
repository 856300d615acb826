"""Steps of reproducible models: the last of a rank's backwards in a step reduces the gradients."""

import weakref
from collections.abc import Sequence

from shardwise.errors import StepError
from shardwise.runtime.engine import Runtime
from shardwise.runtime.observer import StepLeaves
from shardwise.runtime.unit import Unit
from shardwise.runtime.versions import versions_of

__all__ = ["Leaves"]


class Leaves(StepLeaves):
    """Divides the steps of a reproducible model into leaves."""

    def __init__(self, runtime: Runtime) -> None:
        # Weak, because the scheduler refers to this object.
        self._scheduler = weakref.proxy(runtime.scheduler)
        self._units = runtime.units
        self._mesh = runtime.mesh
        self.num_done = 0
        self._holds_gradients = False  # the last leaf has left some
        self._last_step: CompleteStep | None = None

    def began(self, *, checks_last_step: bool = False) -> None:
        self._drop_zeroed()
        if checks_last_step:
            self._check_last_step_was_used()
        is_last = self.num_done + 1 == len(self._mesh.own_leaves)
        for unit in self._units:
            unit.settings.reduce_grads = is_last

    def check_calls(self) -> None:
        if (unit := self._scheduler.sequencer.finished_again) is not None:
            raise StepError(
                f"{self._units[unit].plan.label}: a reproducible model was called several times "
                "before one backward; its gradients would be reduced once per call, in an order "
                "that depends on the number of ranks; call it once per micro-batch"
            )

    def ended(self) -> None:
        self.num_done = (self.num_done + 1) % len(self._mesh.own_leaves)
        gradients = self._scheduler.gradients
        self._holds_gradients = any(one.accumulated.is_active for one in gradients)
        self._last_step = None if self.num_done else CompleteStep(self._units)

    def num_open(self) -> int:
        if self.num_done:
            self._scheduler.drop_replaced_gradients()
            self._drop_zeroed()
        return self.num_done

    def refuse_conversion(self) -> None:
        raise StepError(
            f"after {self.num_done} of this rank's {len(self._mesh.own_leaves)} micro-batches of a "
            "step, a reproducible model cannot be converted or sharded again; do it between steps"
        )

    def dropped(self) -> None:
        self.num_done, self._holds_gradients = 0, False

    def _drop_zeroed(self) -> None:
        gradients = self._scheduler.gradients
        if self._holds_gradients and all(one.accumulated.is_empty for one in gradients):
            self._scheduler.drop_accumulated()  # the rest of what ``zero_grad()`` has dropped

    def _check_last_step_was_used(self) -> None:
        """Raise a StepError if nothing has used the gradients of the last step."""
        if self._last_step is None or not self._last_step.is_untouched():
            self._last_step = None
            return
        number = len(self._mesh.own_leaves)
        raise StepError(
            f"one backward more than the {number} of a step (reproducible={self._mesh.leaves} on "
            f"{self._mesh.num_ranks} ranks), whose gradients neither an optimizer nor zero_grad() "
            "has used: expected one backward for each of sw.leaves(model), and then a step of the "
            "optimizer; add several losses of a micro-batch before its backward, or call "
            "zero_grad() to drop the step"
        )


class CompleteStep:
    """The gradients of a step, which an optimizer or ``zero_grad()`` should use before the next."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._left = [
            (one, weakref.ref(gradient), (versions_of(one), gradient._version))
            for unit in units
            for one in unit.parameters
            if (gradient := one.sharded.grad) is not None
        ]

    def is_untouched(self) -> bool:
        """Whether all gradients are still there, and neither they nor parameters have changed."""
        return bool(self._left) and all(
            (gradient := one.sharded.grad) is not None
            and gradient is before()
            and (versions_of(one), gradient._version) == versions
            for one, before, versions in self._left
        )
