"""A unit at work: its parameters whole or in shards, and its gradients on their way to the shards.

For every layout of its plan a unit has a `FlatParameters`: the persistent ``shard`` [S] that the
`ShardedTensor` parameters view, and the flat buffers that come and go::

    between steps   shard [S]   p = ShardedTensor(run of shard)
    in use          buffer [world_size * S], dense parameters view it    <- all-gather of shards
    in backward     gradients [world_size * S], one slot a parameter     -> reduce-scatter
    after it        gradient shard [S]   p.grad = ShardedTensor(run of it)
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from shardwise.errors import StepError
from shardwise.plan.layout import Layout
from shardwise.plan.units import UnitPlan
from shardwise.runtime.buffer import FlatBuffer, Pool
from shardwise.runtime.collectives import Communicator, Link, Pending
from shardwise.runtime.device import Mark
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.managed import ManagedParameter
from shardwise.runtime.mesh import Axis
from shardwise.runtime.sharded_tensor import ShardedTensor

__all__ = ["FlatParameters", "Unit", "UnitState"]


class UnitState(StrEnum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


_TRANSITIONS = {
    (UnitState.SHARDED, UnitState.GATHERING),
    (UnitState.GATHERING, UnitState.GATHERED),
    (UnitState.GATHERING, UnitState.SHARDED),  # gathered ahead in vain, or an exception
    (UnitState.GATHERED, UnitState.SHARDED),
}


class FlatParameters:
    """The parameters of one layout."""

    def __init__(self, layout: Layout, axis: Axis, pool: Pool) -> None:
        self.layout = layout
        self.axis = axis
        self.is_whole = layout.world_size == 1  # the shard is the buffer: nothing to gather
        self.buffer = FlatBuffer(layout, pool, owns_memory=self.is_whole)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.shard = (
            self.buffer.flat
            if self.is_whole
            else torch.zeros(layout.shard_elements, dtype=dtype, device=pool.device)
        )
        self.parameters: list[ManagedParameter] = []  # in the order of the layout's slots
        trainable = layout.slots[0].parameter.trainable
        self.gradients = Gradients(layout, self.parameters, axis, pool) if trainable else None

    def launch_gather(self, link: Link, label: str) -> Pending:
        self.reclaim_locals()
        self.buffer.acquire()
        own_slot = self.buffer.slot_of(self.axis.rank)
        shard = self.shard
        return link.all_gather(self.buffer.flat, lambda: _copy(own_slot, shard), label)

    def write_back(self) -> None:
        """Take over what was written into the gathered parameters."""
        if self.is_whole:
            return
        self.shard.copy_(self.buffer.slot_of(self.axis.rank))

    def reclaim_locals(self) -> None:
        """Notice parameters whose memory was replaced, as `Module.to` and `assign=True` do."""
        for parameter in self.parameters:
            current = parameter.homes[0].get()
            if isinstance(current, ShardedTensor) and current.to_local() is parameter.local:
                continue
            if current is not None:
                parameter.adopt(current)


class Unit:
    """The parameters of a `UnitPlan`, gathered and freed together."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.flats = tuple(flats)
        self.state = UnitState.SHARDED
        self.expects_gradients = False
        self._gathering: list[Pending] = []
        self._reducing: list[Pending] = []
        self._is_exposed = False

    @property
    def parameters(self) -> Iterator[ManagedParameter]:
        for flat in self.flats:
            yield from flat.parameters

    @property
    def gradients(self) -> Iterator[Gradients]:
        return (flat.gradients for flat in self.flats if flat.gradients is not None)

    # -- parameters ------------------------------------------------------------------------------

    def launch_gather(self, link: Link) -> tuple[Mark, ...]:
        self._move(UnitState.GATHERING)
        label = f"gather {self.plan.label}"
        cut = [flat for flat in self.flats if not flat.is_whole]
        self._gathering = [flat.launch_gather(link, label) for flat in cut]
        return tuple(pending.mark for pending in self._gathering)

    def await_gather(self, links: Communicator) -> None:
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        self._move(UnitState.GATHERED)

    def expose(self) -> None:
        """Put the dense parameters into the modules."""
        if not self._is_exposed:
            for flat in self.flats:
                if flat.is_whole:  # otherwise the gather did it
                    flat.reclaim_locals()
            for parameter in self.parameters:
                parameter.expose()
            self._is_exposed = True

    def conceal(self) -> None:
        """Put the sharded parameters back."""
        if self._is_exposed:
            for parameter in self.parameters:
                parameter.conceal()
            self._is_exposed = False

    def free(self, links: Communicator) -> None:
        """Drop the gathered parameters; a gather under way is waited for first.

        Raises:
            StepError: one of them was changed in place, and the change would be lost.
        """
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        self.conceal()
        for flat in self.flats:
            if flat.buffer.is_acquired:
                flat.buffer.release()
        self._move(UnitState.SHARDED)
        changed = [parameter.name for parameter in self.parameters if parameter.forget_changes()]
        if changed:
            raise StepError(
                f"{', '.join(changed)}: changed in place while gathered, which is lost when "
                f"{self.plan.label} is freed; change the sharded parameter between steps, or "
                "whole ones in sw.gathered(model, write_back=True)"
            )

    def forget_changes(self) -> None:
        """Do not mind that the gathered parameters were changed."""
        for parameter in self.parameters:
            parameter.forget_changes()

    # -- gradients -------------------------------------------------------------------------------

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
        if self.plan.encloses:
            return  # its buffer would be open during the whole backward of the units inside
        flat.gradients.write(position, gradient)
        parameter.dense.grad = None

    def launch_reduce(self, link: Link) -> tuple[Mark, ...]:
        label = f"reduce {self.plan.label}"
        for flat in self.flats:
            self._write_kept(flat)
        self._reducing = [gradients.launch_reduce(link, label) for gradients in self.gradients]
        self.expects_gradients = False
        return tuple(pending.mark for pending in self._reducing)

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
        return all(pending.mark.is_done for pending in (*self._gathering, *self._reducing))

    def quiesce(self, seconds: float) -> bool:
        """Wait a little for its communication to end, successfully or not."""
        for pending in (*self._gathering, *self._reducing):
            pending.mark.wait(seconds)
        return self.is_quiet

    def reset(self) -> None:
        """Back to shards, whatever was going on."""
        assert self.is_quiet
        self._gathering, self._reducing = [], []
        self.expects_gradients = False
        self.conceal()
        self.forget_changes()
        for parameter in self.parameters:
            parameter.dense.grad = None
        for gradients in self.gradients:
            gradients.discard()
        for flat in self.flats:
            if flat.buffer.is_acquired:
                flat.buffer.release()
        self.state = UnitState.SHARDED

    def _write_kept(self, flat: FlatParameters) -> None:
        for position, parameter in enumerate(flat.parameters):
            gradient = parameter.dense.grad
            if gradient is not None and flat.gradients is not None:
                flat.gradients.write(position, gradient)
                parameter.dense.grad = None

    def _move(self, to: UnitState) -> None:
        assert (self.state, to) in _TRANSITIONS, f"{self.plan.label}: {self.state} -> {to}"
        self.state = to


def _copy(to: Tensor, of: Tensor) -> None:
    with torch.no_grad():
        to.copy_(of)
