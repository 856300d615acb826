"""The engine of one sharded model: runs calls of units.

From a call to its all-gather: a unit's `__call__` calls `Runtime.call`, which enters the unit in
the `Scheduler`. It gets the events to perform from `schedule.sequencer`, and has the `Unit` launch
the gather in a queue of `comm.communicator`.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise import _private
from shardwise.comm.device import is_accelerator
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.runtime import hooks
from shardwise.runtime.attach import move_buffers, parameter_of, settings_of
from shardwise.runtime.casting import cast_tensors, move_tensors
from shardwise.runtime.kept_tensors import Entries, Entry, ParameterViews
from shardwise.runtime.memory import Pools
from shardwise.runtime.nested import tensors_in, tensors_left_in, tensors_within
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter, tied_since
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.structure import HANDLE, InnerHook, Structure
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.schedule.sequencer import Outcome
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import sharding_for

__all__ = ["HANDLE", "Handle", "Runtime"]


@dataclass(frozen=True)
class Handle:
    """Connects a module with its unit."""

    runtime: "Runtime"
    index: int
    options: UnitOptions  # what the user chose
    # The module of the innermost unit around it that holds parameters which its modules share.
    lender: weakref.ref[nn.Module] | None = None

    @property
    def unit(self) -> Unit:
        return self.runtime.units[self.index]

    @property
    def mesh(self) -> DataParallelMesh:
        """The ranks that shard the unit."""
        return self.runtime.own_meshes.get(self.unit.plan.name, self.runtime.mesh)


class Request(Protocol):
    """What the user asked for, of which a `Runtime` is the result."""

    def apply(self, module: nn.Module, converted: Collection[str] = ()) -> None:
        """Plan ``module`` and shard it, for example for other dtypes.

        ``converted``: compute dtypes of float32 masters that no longer apply.
        """

    def build(self, root: nn.Module, plan: Plan, like: "Runtime") -> "Runtime":
        """Shard ``root``, or a copy of it, by another plan than ``like``."""


class Runtime:
    """One sharded model: its plan, its units, and the scheduler that runs them.

    The modules refer to it, but it refers to no module, so a deleted model frees its memory.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        mesh: DataParallelMesh,
        device: torch.device,
        request: Request,
        fill: Callable[[UnitPlan], None] | None,  # initializes the parameters of a unit
        own_meshes: Mapping[str, DataParallelMesh],
    ) -> None:
        self.initialized_parameters = fill is not None  # the parameters had no values before
        self.request = request
        self.plan = plan
        self.mesh = mesh
        self.own_meshes = own_meshes  # by name, of units with other ranks than the model
        self.pools = Pools(device)
        self._has_accelerator = is_accelerator(device)
        self._offloader = cache(partial(HostOffloader, device))  # one per policy
        if fill is None:
            self.units = [self._make_unit(root, unit, lambda _: None) for unit in plan.units]
        else:  # inner units first
            self.units = [self._make_unit(root, unit, fill) for unit in plan.units[::-1]][::-1]
        self._views = ParameterViews(self.units)
        self._entries = Entries(self._views)
        move_buffers(root, device)
        self.scheduler = Scheduler(plan, self.units, mesh, device)
        meshes = {flat.mesh for unit in self.units for flat in unit.flats}
        self.scheduler.ledger.note_traffic_of({mesh, *own_meshes.values(), *meshes})
        self._frozen = [
            one
            for one in self.scheduler.parameters
            if not (one.spec.trainable or one.spec.is_extended)
        ]
        for index, unit in enumerate(self.units):
            self._listen(index, unit)

    def call(
        self,
        handle: "Handle",
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward of a unit with its parameters gathered.

        Or that of ``module``, another unit to which this one lends parameters.
        """
        scheduler, index, precision = self.scheduler, handle.index, handle.options.precision
        task = hooks.current_task()
        if task != hooks.NO_TASK:
            scheduler.enter_backward(task)
        elif not scheduler.in_gathered and vars(module)[HANDLE].index == index:  # not lent
            self._structures[index].check(module, self._is_dense)
        if self._has_accelerator and (index == 0 or scheduler.is_outermost):
            args, kwargs = move_tensors((args, kwargs), self.pools.device)
        with _private.without_transforms():
            call = scheduler.enter(index, recomputed=task != hooks.NO_TASK)
        if call is None:
            # Inside `gathered` parameters are whole already, and autograd records nothing. But a
            # transform may differentiate parameters that `torch.func.functional_call` replaced.
            is_recorded = torch.is_grad_enabled() and _private.is_transformed_by_functorch()
            with torch.set_grad_enabled(is_recorded):
                return forward(*args, **kwargs)
        # A weight that autocast has cast in an earlier call gets its gradient when backward has
        # left that call, which may be after the unit's reduction.
        torch.clear_autocast_cache()
        entry = None
        try:
            if precision.cast_forward_inputs and precision.param_dtype is not None:
                args, kwargs = cast_tensors((args, kwargs), precision.param_dtype)
            inputs = tensors_within((args, kwargs)) if task != hooks.NO_TASK else ()
            # What autograd records in this call; `call` is what the schedule knows of it.
            entry = self._entries.begin(index, partial(scheduler.before_backward, call), inputs)
            hooks.watch_gradients(module, (args, kwargs), entry.callback)
            with self._entries.observing(scheduler.ledger.step):
                output = forward(*args, **kwargs)
            if precision.output_dtype is not None:
                output = cast_tensors(output, precision.output_dtype)
            output, outcome = self._watch(index, module, entry, (args, kwargs), output)
        except BaseException as error:
            with _private.without_transforms():
                scheduler.leave(call, Outcome.FAILED, error)
            raise
        finally:
            if entry is not None:
                self._entries.end(entry)
        with _private.without_transforms():
            scheduler.leave(call, outcome)
        return output

    def unwind(self, depth: int, error: BaseException) -> None:
        """End a call that began at ``depth``, wherever ``error`` has left it."""
        self.scheduler.unwind(depth, error)
        if depth == 0:
            self._entries.forget_running()

    def _watch(
        self, index: int, module: nn.Module, entry: Entry, inputs: Any, output: Any
    ) -> tuple[Any, Outcome]:
        """Prepare for backward to enter a call, through any tensor that outlives it.

        Returns the output, copied where it views a parameter, and how the call has ended.
        """
        plan = self.plan.units[index]
        returned, left = list(tensors_in(output)), tensors_left_in(module)
        given = tensors_within(inputs)
        if self._views.has_any((*returned, *left), given, plan.label):
            output = self._views.copy_outputs(module, inputs, output, plan.label)
            returned, left = list(tensors_in(output)), tensors_left_in(module)
            given = tensors_within(inputs)
        is_watched = torch.is_grad_enabled() and self._entries.watch(entry, (*returned, *left))
        if torch.is_grad_enabled():
            self._entries.watch(entry, given, only_own=True)
        trainable = plan.gradient_bytes > 0
        outcome = hooks.outcome_of(module, returned, is_watched=is_watched, trainable=trainable)
        return output, outcome

    def is_converted(self) -> bool:
        """Whether the dtype or device of parameters was changed since they were sharded."""
        is_idle, parameters = self.scheduler.is_between_steps, self.scheduler.parameters
        return is_idle and any(map(FSDPParameter.is_converted, parameters))

    def is_tied_since(self) -> bool:
        """Whether a parameter was put in the place of another one since they were sharded."""
        return self.scheduler.is_between_steps and bool(tied_since(self.scheduler.parameters))

    def is_outdated(self) -> bool:
        """Whether a forward may have to shard again first: see `shard_again_if_outdated`."""
        is_replaced = any(map(FSDPParameter.is_replaced, self.scheduler.parameters))
        return is_replaced or any(one.sharded.requires_grad for one in self._frozen)

    def is_converted_by(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether ``fn``, an argument of `Module._apply`, changes a dtype or device."""
        kinds = {(p.local.dtype, p.local.device) for p in self.scheduler.parameters}
        empty = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
        return any((fn(one).dtype, fn(one).device) != (one.dtype, one.device) for one in empty)

    def masters_converted_by(self, fn: Callable[[Tensor], Tensor]) -> set[str]:
        """The compute dtypes of masters that ``fn`` changes, perhaps without changing a master."""
        if not self.scheduler.is_between_steps:
            return set()
        found = {
            spec.cast.compute_dtype
            for unit in self.plan.units
            for spec in unit.parameters
            if spec.cast is not None and unit.options.precision.param_dtype is None
        }
        tensors = {
            n: torch.empty(0, dtype=getattr(torch, n), device=self.pools.device) for n in found
        }
        return {name for name, tensor in tensors.items() if fn(tensor).dtype != tensor.dtype}

    def unfrozen(self) -> list[str]:
        """The names of parameters that were frozen when they were sharded and no longer are."""
        names = [one.name for one in self._frozen if one.sharded.requires_grad]
        return names if self.scheduler.is_between_steps else []

    def _is_dense(self, tensor: Tensor) -> bool:
        return any(one.dense is tensor for one in self.scheduler.parameters)

    def watch_structure(self, root: nn.Module, *, warns: bool) -> None:
        """Make forward refuse parameters that are added from now on, or warn about them."""
        self.warns_of_added = warns
        self._structures = [
            Structure(
                root.get_submodule(unit.name),
                unit.name,
                warns=warns,
                watch_inner=InnerHook(_watch_inner, weakref.ref(self), index),
            )
            for index, unit in enumerate(self.plan.units)
        ]

    # -- construction ----------------------------------------------------------------------------

    def _make_unit(self, root: nn.Module, plan: UnitPlan, fill: Callable[[UnitPlan], None]) -> Unit:
        """Shard the parameters of ``plan``, after ``fill`` has initialized them."""
        offloader = None if plan.offload is None else self._offloader(plan.offload)
        mesh = self.own_meshes.get(plan.name, self.mesh)
        in_step = mesh if mesh is self.mesh else mesh.within(self.mesh)
        module = root.get_submodule(plan.name)
        settings, of_unit = settings_of(module), weakref.ref(module)
        flats = [
            FlatParameters(layout, in_step, self.pools, plan, settings, offloader)
            for layout in plan.layouts
        ]
        fill(plan)  # after the memory that was used to lay out the flat buffers is free again
        for flat in flats:
            for position, extent in enumerate(flat.layout.extents):
                original = parameter_of(root, extent.parameter.name)
                sharding = sharding_for(plan, flat.layout, extent, mesh, original, of_unit)
                flat.parameters.append(flat.codec.adopt(root, original, sharding, position))
        return Unit(plan, flats, settings)

    def _listen(self, index: int, unit: Unit) -> None:
        scheduler = weakref.ref(self.scheduler)
        for number, flat in enumerate(unit.flats):
            for position, parameter in enumerate(flat.parameters):
                parameter.on_gradient = partial(_accept, scheduler, index, number, position)
                parameter.watch_gradient()


def _watch_inner(
    runtime_ref: "weakref.ref[Runtime]", index: int, _module: nn.Module, args: Any, output: Any
) -> None:
    """Watch the inputs and outputs of a module inside a unit, whose forward hooks may keep them."""
    runtime = runtime_ref()
    if runtime is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    entry = runtime._entries.running(index)
    if entry is not None:
        runtime._entries.watch(entry, tensors_within((args, output)), only_own=True)


def _accept(
    scheduler_ref: "weakref.ref[Scheduler]", index: int, number: int, position: int
) -> None:
    if (scheduler := scheduler_ref()) is not None:  # else the graph outlived the model
        scheduler.accept(index, number, position)
