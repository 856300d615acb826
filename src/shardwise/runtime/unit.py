"""A unit at work: with a `FlatParameters` for each layout of its plan, and its gradients."""

import time
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from shardwise.errors import StepError
from shardwise.plan.plan import UnitSettings
from shardwise.plan.units import UnitPlan
from shardwise.runtime.flat_parameters import FlatParameters
from shardwise.runtime.gradients import GradientBuffer
from shardwise.runtime.parameters import FSDPParameter
from shardwise.schedule.events import Event
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives, Communicator

__all__ = ["Unit", "plan_memory"]


class Unit:
    """The parameters of a `UnitPlan`, gathered and freed together."""

    def __init__(
        self, plan: UnitPlan, flats: Sequence[FlatParameters], settings: UnitSettings
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.flats = tuple(flats)
        self._cut = [flat for flat in flats if not flat.is_whole]
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

    @property
    def mesh(self) -> DataParallelMesh:
        """Its ranks, as numbered in collectives; of a unit with parameters."""
        return self.flats[0].mesh

    # -- parameters ------------------------------------------------------------------------------

    def launch_gather(self, collectives: Collectives) -> tuple[Work, ...]:
        label = f"gather {self.plan.label}"
        works = tuple(flat.launch_gather(collectives, label) for flat in self._cut)
        self._gathering += works
        return works

    def launch_subgroup_part(self, collectives: Collectives) -> tuple[Work, ...]:
        label = f"keep {self.plan.label}"
        launched = [flat.launch_subgroup_part(collectives, label) for flat in self._cut]
        works = tuple(work for work in launched if work is not None)
        self._gathering += works
        return works

    def free_subgroup_part(self) -> None:
        for flat in self.flats:
            flat.free_subgroup_part()

    def await_gather(self, links: Communicator) -> None:
        self._await_all(self._gathering, links)
        for flat in self._cut:
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
        """Drop the gathered parameters, unchanged; a gather under way is waited for first."""
        self._await_all(self._gathering, links)
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
        self._await_all(self._gathering, links)
        self._is_exposed = True
        for flat in self.flats:
            flat.use_held()

    def release_hold(self, *, write_back: bool) -> None:
        self.use_sharded()
        for flat in self.flats:
            flat.release_hold(write_back=write_back)

    # -- gradients -------------------------------------------------------------------------------

    def claim_gradient(
        self, flat: FlatParameters, position: int, *, in_slot: bool
    ) -> tuple[Tensor, bool] | None:
        """Where to compute the gradient of a parameter; see `GradientBuffer.claim`."""
        if flat.gradients is None or not self.expects_gradients:
            return None
        return flat.gradients.claim(position, in_slot=in_slot)

    def accept(self, flat: FlatParameters, position: int) -> None:
        """Take the gradient that autograd has just put on a dense parameter."""
        assert flat.gradients is not None
        parameter = flat.parameters[position]
        if parameter.dense.grad is None:
            return
        if not self.expects_gradients:
            parameter.dense.grad = None
            raise StepError(
                f"{parameter.name}: received a gradient, but {self.plan.label} is not part of this "
                "backward; was something kept from a forward that raised, or from another model?"
            )
        flat.gradients.accept(position)

    def take_gradients(self) -> None:
        """`accept` all gradients that there are on dense parameters, outside of a backward."""
        self.expects_gradients = True
        for flat in self.flats:
            for position in range(len(flat.parameters) if flat.gradients is not None else 0):
                self.accept(flat, position)
        self.end_backward()

    def launch_reduce(self, collectives: Collectives) -> tuple[Work, ...]:
        """Reduce the gradients over the row, and over the column if the settings say so."""
        label = f"reduce {self.plan.label}"
        self._reducing = [
            gradients.launch_reduce(collectives, label) for gradients in self.gradients
        ]
        self.expects_gradients = False
        return tuple(self._reducing)

    def end_backward(self) -> None:
        """Move what a later reduction gets to its buffer, so that it adds up in that dtype."""
        for gradients in self.gradients:
            gradients.write_kept()
        self.expects_gradients = False

    def expect_changes(self) -> None:
        """Between steps the shards may have been changed, or their memory replaced."""
        for flat in self.flats:
            flat.device_copy_is_stale = True
            if not self._is_exposed:  # `Module.to` before a step is no change within it
                flat.reclaim_locals()

    def collect(self, links: Communicator) -> None:
        self._await_all(self._reducing, links)
        for gradients in self.gradients:
            gradients.collect()

    # -- after an exception ----------------------------------------------------------------------

    def quiesce(self, until: float) -> bool:
        """Wait for its communication to end, successfully or not, until that time; if it has."""
        works = (*self._gathering, *self._reducing)
        for work in works:
            work.wait(max(0.0, until - time.monotonic()))
        return all(work.done for work in works)

    def reset(self) -> None:
        """Return to shards from any state; no communication is under way."""
        self._gathering, self._reducing = [], []
        self.expects_gradients = False
        self.use_sharded()
        for parameter in self.parameters:
            parameter.forget_changes()
            parameter.dense.grad = None
        for gradients in self.gradients:
            gradients.discard()
        for flat in self.flats:
            flat.free()
            flat.free_subgroup_part()
            flat.release_hold(write_back=False)

    def _await_all(self, works: list[Work], links: Communicator) -> None:
        for work in works:
            links.wait(work)
        works.clear()


def plan_memory(units: Sequence[Unit], events: Iterable[Event]) -> None:
    """Plan offsets for what ``events``, one imagined step of ``units``, allocate and free."""
    for event in events:
        for flat in units[event.unit].flats:
            flat.expect(event.kind)
