"""A unit at work: its parameters whole or in shards, and its gradients on their way to the shards.

For every layout of its plan a unit has a `FlatParameters`: the persistent ``shard`` [S] that the
`ShardedTensor` parameters view, and the flat buffers that come and go::

    between steps   shard [S]   p = ShardedTensor(run of shard)
    in use          buffer [world_size * S], dense parameters view it    <- all-gather of shards
    in backward     gradients [world_size * S], one slot a parameter     -> reduce-scatter
    after it        gradient shard [S]   p.grad = ShardedTensor(run of it)
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError, StepError
from shardwise.plan.layout import Layout
from shardwise.plan.units import UnitPlan
from shardwise.runtime.buffer import FlatBuffer, Pool, is_shared
from shardwise.runtime.collectives import Communicator, Link, Pending
from shardwise.runtime.device import Mark
from shardwise.runtime.mesh import Axis
from shardwise.runtime.sharded_tensor import (
    ShardedTensor,
    Sharding,
    apply_gradient_hooks,
    run_accumulated_hooks,
)

__all__ = ["FlatParameters", "Home", "ManagedParameter", "Unit", "UnitState"]


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


class Home:
    """A module's attribute that holds a parameter; tied parameters have several."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        # Recurrent layers keep a second list of their weights up to date in __setattr__.
        self._is_plain = type(module).__setattr__ is nn.Module.__setattr__

    def get(self) -> Tensor | None:
        """What is there now; None if the module is gone."""
        module = self._module()
        return None if module is None else getattr(module, self._attribute)

    def put(self, parameter: nn.Parameter) -> None:
        module = self._module()
        if module is None:
            return
        if self._is_plain:
            module._parameters[self._attribute] = parameter
        else:
            setattr(module, self._attribute, parameter)


@dataclass(eq=False, slots=True)
class ManagedParameter:
    """One parameter: what the user sees between steps, and what the modules compute with."""

    sharding: Sharding
    sharded: nn.Parameter  # holds a ShardedTensor
    local: Tensor  # [run], of the shard
    dense: nn.Parameter  # [shape], of the flat buffer
    homes: Sequence[Home]
    _version: int = 0  # of `dense`, when it was last known to be what was gathered

    @property
    def name(self) -> str:
        return self.sharding.name

    def forget_changes(self) -> bool:
        """Whether the dense parameter was changed in place since this was last asked."""
        before, self._version = self._version, self.dense._version
        return before != self._version

    def expose(self) -> None:
        """Let the modules see the dense parameter."""
        if self.dense.requires_grad != self.sharded.requires_grad:
            self._follow_requires_grad()
        for home in self.homes:
            home.put(self.dense)

    def conceal(self) -> None:
        """Let them see the sharded one again."""
        for home in self.homes:
            home.put(self.sharded)

    def adopt(self, replacement: Tensor) -> None:
        """Copy what the user put in place of the shard into it.

        Raises:
            PlanError: it has another dtype, device or shape, or is not sharded.
        """
        fits = (
            isinstance(replacement, ShardedTensor)
            and replacement.sharding.matches(self.sharding)
            and replacement.dtype == self.local.dtype
            and replacement.device == self.local.device
        )
        if not fits or not isinstance(replacement, ShardedTensor):
            raise PlanError(
                f"{self.name} was replaced after fully_shard: expected {self.local.dtype} on "
                f"{self.local.device}, sharded; got {replacement.dtype} on {replacement.device}, "
                f"a {type(replacement).__name__}; convert and move the model before fully_shard"
            )
        with torch.no_grad():
            self.local.copy_(replacement.to_local())
        replacement.rebind(self.local)
        assert isinstance(replacement, nn.Parameter)
        self.sharded = replacement

    def _follow_requires_grad(self) -> None:
        if self.sharded.requires_grad and not self.sharding.slot.parameter.trainable:
            raise PlanError(
                f"{self.name} was frozen when it was sharded and has no room for gradients; "
                "set requires_grad before fully_shard"
            )
        self.dense.requires_grad_(self.sharded.requires_grad)


class FlatParameters:
    """The parameters of one layout."""

    def __init__(self, layout: Layout, axis: Axis, pool: Pool) -> None:
        self.layout = layout
        self.axis = axis
        self.buffer = FlatBuffer(layout, pool)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.shard = torch.zeros(layout.shard_elements, dtype=dtype, device=pool.device)
        self.parameters: list[ManagedParameter] = []  # in the order of the layout's slots
        trainable = layout.slots[0].parameter.trainable
        self.gradients = Gradients(self, pool) if trainable else None

    def locals_of(self, flat_shard: Tensor) -> Iterator[Tensor]:
        """This rank's run of every parameter in ``flat_shard`` [S]."""
        for slot in self.layout.slots:
            start = self.layout.offset_in_shard(slot, self.axis.rank)
            length = len(self.layout.run(slot, self.axis.rank))
            yield flat_shard[start : start + length].data

    def launch_gather(self, link: Link, label: str) -> Pending:
        self._reclaim_locals()
        self.buffer.acquire()
        own_slot = self.buffer.slot_of(self.axis.rank)
        shard = self.shard
        return link.all_gather(self.buffer.flat, lambda: _copy(own_slot, shard), label)

    def write_back(self) -> None:
        """Take over what was written into the gathered parameters."""
        self.shard.copy_(self.buffer.slot_of(self.axis.rank))

    def _reclaim_locals(self) -> None:
        """Notice parameters whose memory was replaced, as `Module.to` and `assign=True` do."""
        for parameter in self.parameters:
            current = parameter.homes[0].get()
            if isinstance(current, ShardedTensor) and current.to_local() is parameter.local:
                continue
            if current is not None:
                parameter.adopt(current)


class Gradients:
    """The gradients of one layout, from the moment autograd yields them to ``p.grad``."""

    def __init__(self, owner: FlatParameters, pool: Pool) -> None:
        self._owner = weakref.proxy(owner)
        self._pool = pool
        self._buffer = FlatBuffer(owner.layout, pool)
        self._written = [False] * len(owner.layout.slots)
        self.used = [False] * len(owner.layout.slots)
        self._fresh: list[int] = []  # positions whose .grad was None before this backward
        self._kept_shard: Tensor | None = None  # [S], reused when nobody holds the last .grad
        self._reduced: Tensor | None = None  # [S]
        self._borrowed: list[torch.UntypedStorage] = []

    def write(self, position: int, gradient: Tensor) -> None:
        """Put a gradient into its slot of the reduce buffer, divided by the number of ranks."""
        if not self._buffer.is_acquired:
            self._buffer.acquire()
        slot = self._buffer.views[position]
        scale = 1.0 / self._owner.axis.size
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._written[position]:
            slot.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=slot)
        self._written[position] = True

    def launch_reduce(self, link: Link, label: str) -> Pending:
        """Reduce what was written; slots that nothing was written to count as zeros."""
        if not self._buffer.is_acquired:
            self._buffer.acquire()
        for position, view in enumerate(self._buffer.views):
            if not self._written[position]:
                view.zero_()
        self._written = [False] * len(self._written)
        self._reduced = self._target()
        scratch_elements = link.scratch_slots * self._owner.layout.shard_elements
        scratch = self._borrow(scratch_elements)
        return link.reduce_scatter(self._buffer.flat, self._reduced, scratch, label)

    def collect(self) -> None:
        """Hand the reduced gradients to the parameters."""
        assert self._reduced is not None
        is_kept = self._reduced is self._kept_shard
        runs = self._owner.locals_of(self._reduced)
        with torch.no_grad():
            for position, (parameter, run) in enumerate(
                zip(self._owner.parameters, runs, strict=True)
            ):
                if not parameter.sharded.requires_grad:
                    continue
                own = run if is_kept or parameter.sharded.grad is not None else run.clone()
                gradient = ShardedTensor(own, parameter.sharding)
                if _accumulate(parameter, apply_gradient_hooks(parameter.sharded, gradient)):
                    self._fresh.append(position)
        self._reduced = None
        self._give_back()

    def settle(self, used_anywhere: Sequence[bool]) -> None:
        """A parameter that no rank used keeps the gradient it had, which may be None."""
        for position in self._fresh:
            if not used_anywhere[position]:
                self._owner.parameters[position].sharded.grad = None
        for parameter, used in zip(self._owner.parameters, used_anywhere, strict=True):
            if used and parameter.sharded.requires_grad:
                run_accumulated_hooks(parameter.sharded)
        self.forget()

    def forget(self) -> None:
        self._fresh = []
        self.used = [False] * len(self.used)

    def discard(self) -> None:
        """Drop what is under way."""
        self._written = [False] * len(self._written)
        self._reduced = None
        self._give_back()
        self.forget()

    def _target(self) -> Tensor:
        """Where to reduce to [S]: what will be the gradients, or memory to add to them from."""
        if any(p.sharded.grad is not None for p in self._owner.parameters):
            return self._borrow(self._owner.layout.shard_elements)
        if self._kept_shard is None or is_shared(self._kept_shard, own_references=1):
            self._kept_shard = torch.empty_like(self._owner.shard)
        return self._kept_shard

    def _borrow(self, num_elements: int) -> Tensor:
        dtype = self._owner.shard.dtype
        storage = self._pool.take(num_elements * dtype.itemsize)
        self._borrowed.append(storage)
        return torch.empty(0, dtype=dtype, device=self._pool.device).set_(
            storage, 0, (num_elements,), (1,)
        )

    def _give_back(self) -> None:
        if self._buffer.is_acquired:
            self._buffer.release()
        for storage in self._borrowed:
            self._pool.give(storage)
        self._borrowed = []


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
        self._gathering = [flat.launch_gather(link, label) for flat in self.flats]
        return tuple(pending.mark for pending in self._gathering)

    def await_gather(self, links: Communicator) -> None:
        for pending in self._gathering:
            links.wait(pending)
        self._gathering = []
        self._move(UnitState.GATHERED)

    def expose(self) -> None:
        """Put the dense parameters into the modules."""
        if not self._is_exposed:
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


def _accumulate(parameter: ManagedParameter, gradient: Tensor) -> bool:
    """Add ``gradient`` to the parameter's; whether it is the first."""
    sharded = parameter.sharded
    if sharded.grad is None:
        sharded.grad = gradient
        return True
    if not isinstance(sharded.grad, ShardedTensor):
        raise PlanError(
            f"{parameter.name}.grad is a {type(sharded.grad).__name__} of the user's, not a "
            "ShardedTensor; set it to None before backward"
        )
    sharded.grad.add_(gradient)
    return False
