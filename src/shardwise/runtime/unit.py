"""A unit at work: its parameters whole or in shards, its gradients on their way to the shards.

The buffers are those of its `FlatParameters`, one for every layout of its plan.
"""

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from shardwise.errors import StepError
from shardwise.plan.units import UnitPlan
from shardwise.runtime.flat_parameters import FlatParameters
from shardwise.runtime.gradients import GradientBuffer, ReduceHook
from shardwise.runtime.parameters import FSDPParameter
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives, Communicator

__all__ = ["Unit"]


class Unit:
    """The parameters of a `UnitPlan`, gathered and freed together."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.flats = tuple(flats)
        self.expects_gradients = False
        self._gathering: list[Work] = []
        self._reducing: list[Work] = []
        self._is_exposed = False

    @property
    def parameters(self) -> Iterator[FSDPParameter]:
        for flat in self.flats:
            yield from flat.parameters

    @property
    def gradients(self) -> Iterator[GradientBuffer]:
        return (flat.gradients for flat in self.flats if flat.gradients is not None)

    # -- parameters ------------------------------------------------------------------------------

    def launch_gather(self, collectives: Collectives) -> tuple[Work, ...]:
        label = f"gather {self.plan.label}"
        cut = [flat for flat in self.flats if not flat.is_whole]
        pending = [flat.launch_gather(collectives, label) for flat in cut]
        self._gathering += pending
        return tuple(pending)

    def launch_subgroup_part(self, collectives: Collectives) -> tuple[Work, ...]:
        label = f"keep {self.plan.label}"
        cut = [flat for flat in self.flats if not flat.is_whole]
        pending = [
            one
            for flat in cut
            if (one := flat.launch_subgroup_part(collectives, label)) is not None
        ]
        self._gathering += pending
        return tuple(pending)

    def drop(self) -> None:
        for flat in self.flats:
            flat.free_subgroup_part()

    def await_gather(self, links: Communicator) -> None:
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        for flat in self.flats:
            if not flat.is_whole:
                flat.finish_gather()

    def use_unsharded(self) -> None:
        """Put the dense parameters into the modules."""
        if not self._is_exposed:
            for flat in self.flats:
                if flat.is_whole:  # otherwise the gather did it
                    flat.reclaim_locals()
            for parameter in self.parameters:
                parameter.use_unsharded()
            self._is_exposed = True

    def use_sharded(self) -> None:
        """Put the sharded parameters back."""
        if self._is_exposed:
            for parameter in self.parameters:
                parameter.use_sharded()
            self._is_exposed = False

    def free(self, links: Communicator) -> None:
        """Drop the gathered parameters; a gather under way is waited for first.

        Raises:
            StepError: one of them was changed in place, and the change would be lost.
        """
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        self.use_sharded()
        for flat in self.flats:
            flat.free()
        changed = [parameter.name for parameter in self.parameters if parameter.forget_changes()]
        if changed:
            raise StepError(
                f"{', '.join(changed)}: changed in place while gathered, which is lost when "
                f"{self.plan.label} is freed; change the sharded parameter between steps, or "
                "whole ones in sw.gathered(model, write_back=True)"
            )

    def launch_hold(self, collectives: Collectives) -> None:
        """Gather the parameters as they are kept, for use between steps."""
        self._gathering = [
            flat.launch_hold(collectives, f"hold {self.plan.label}") for flat in self.flats
        ]

    def await_hold(self, links: Communicator) -> None:
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        self._is_exposed = True
        for flat in self.flats:
            flat.use_held()

    def release_hold(self, *, write_back: bool) -> None:
        self.use_sharded()
        for flat in self.flats:
            flat.release_hold(write_back=write_back)

    def forget_changes(self) -> None:
        """Do not mind that the gathered parameters were changed."""
        for parameter in self.parameters:
            parameter.forget_changes()

    # -- gradients -------------------------------------------------------------------------------

    def reduce_with(self, hook: ReduceHook) -> None:
        """Have ``hook`` reduce the gradients; see `GradientBuffer.reduce_with`."""
        for gradients in self.gradients:
            gradients.reduce_with(hook)

    def claim_gradient(
        self, flat: FlatParameters, position: int, *, in_slot: bool
    ) -> tuple[Tensor, bool] | None:
        """Where to compute the gradient of a parameter; see `GradientBuffer.claim`."""
        if flat.gradients is None or not self.expects_gradients:
            return None
        return flat.gradients.claim(position, waits=self._waits(flat.gradients), in_slot=in_slot)

    def accept(self, flat: FlatParameters, position: int) -> None:
        """Take the gradient that autograd has just put on a dense parameter."""
        assert flat.gradients is not None
        parameter = flat.parameters[position]
        gradient = parameter.dense.grad
        if gradient is None:
            return
        if not self.expects_gradients:
            parameter.dense.grad = None
            raise StepError(
                f"{parameter.name}: a gradient came when {self.plan.label} had no part in this "
                "backward; was something kept from a forward that raised, or from another model?"
            )
        flat.gradients.used[position] = True
        if self._waits(flat.gradients):
            return
        del gradient
        self._write(flat.gradients, position)

    def take_gradients(self) -> None:
        """`accept` all gradients that there are on dense parameters, outside of a backward."""
        self.expects_gradients = True
        for flat in self.flats:
            for position in range(len(flat.parameters) if flat.gradients is not None else 0):
                self.accept(flat, position)
        self.end_backward()

    def launch_reduce(self, collectives: Collectives, *, all_reduces: bool) -> tuple[Work, ...]:
        """Reduce the gradients over the row, and over the column if ``all_reduces``."""
        label = f"reduce {self.plan.label}"
        for flat in self.flats:
            self._write_kept(flat)
        self._reducing = [
            gradients.launch_reduce(collectives, label, all_reduces=all_reduces)
            for gradients in self.gradients
        ]
        self.expects_gradients = False
        return tuple(self._reducing)

    def end_backward(self) -> None:
        """What is held for a later one adds up in the dtype of reductions, not of compute."""
        for flat in self.flats:
            self._write_kept(flat)
        self.expects_gradients = False

    def reclaim_locals(self) -> None:
        """Notice parameters whose memory was replaced between steps."""
        if not self._is_exposed:
            for flat in self.flats:
                flat.reclaim_locals()

    def expect_changes(self) -> None:
        """The shards may have been changed since they were last brought to the device."""
        for flat in self.flats:
            flat.device_copy_is_stale = True

    def collect(self, links: Communicator) -> None:
        for pending in self._reducing:
            links.wait(pending)
        self._reducing = []
        for gradients in self.gradients:
            gradients.collect()

    # -- after an exception ----------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether no communication of this unit is under way."""
        return all(work.done for work in (*self._gathering, *self._reducing))

    def quiesce(self, seconds: float) -> bool:
        """Wait a little for its communication to end, successfully or not."""
        until = time.monotonic() + seconds
        for work in (*self._gathering, *self._reducing):
            work.wait(max(0.0, until - time.monotonic()))
        return self.is_quiet

    def reset(self) -> None:
        """Back to shards, whatever was going on."""
        assert self.is_quiet
        self._gathering, self._reducing = [], []
        self.expects_gradients = False
        self.use_sharded()
        self.forget_changes()
        for parameter in self.parameters:
            parameter.dense.grad = None
        for gradients in self.gradients:
            gradients.discard()
        for flat in self.flats:
            flat.free()
            flat.free_subgroup_part()
            flat.release_hold(write_back=False)

    def _waits(self, gradients: GradientBuffer) -> bool:
        """Whether its gradients do, for their buffer would be open while units inside compute."""
        return self.plan.has_child_units and not gradients.owns_buffer

    def _write_kept(self, flat: FlatParameters) -> None:
        for position, parameter in enumerate(flat.parameters):
            if parameter.dense.grad is not None and flat.gradients is not None:
                self._write(flat.gradients, position)

    def _write(self, gradients: GradientBuffer, position: int) -> None:
        gradient = gradients.parameters[position].take_gradient()
        assert gradient is not None
        gradients.write(position, gradient)
