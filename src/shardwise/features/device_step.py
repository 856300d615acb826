"""The optimizer's step on the device, for shards and states in host memory.

With ``CPUOffloadPolicy(step="device")``, `torch.optim.Optimizer.step` brings one unit after the
other to the device and steps it there, with stand-ins for its parameters in the optimizer's groups.
Each direction has a stream of its own, and at most `MAX_STEPPED_UNITS` units are on the device::

    to device  | unit 1 | unit 2 | unit 3 |
    compute             | step 1 | step 2 | step 3 |
    to host                      | unit 1 | unit 2 | unit 3 |

The host does not wait. A tensor that is still being written remembers that (`arrives`), and
`local_of` waits for it.

`features.unit_steps` decides which optimizers can be called unit by unit.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import new_dtensor
from shardwise.comm.device import NO_TIME, DeviceStream, DeviceWork, copy_, is_accelerator
from shardwise.errors import PlanError, StepError
from shardwise.features.stepped_units import SteppedUnits
from shardwise.features.unit_steps import (
    check_elementwise,
    groups_of,
    one_step_at_a_time,
    step_only,
    with_evaluated_closure,
)
from shardwise.plan.granularity import Dim
from shardwise.plan.plan import Plan
from shardwise.runtime.codecs import HostCodec
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import Ledger, Record
from shardwise.runtime.parameters import FSDPParameter, attributes_of
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.schedule.events import Event, EventKind
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import BEFORE_USE, Sharding, local_of, sharding_of

__all__ = ["DeviceSteps", "check_granularity", "prefetch_states", "watch"]

State = dict[str, Any]  # of one parameter


def check_granularity(plan: Plan) -> None:
    """Raise a PlanError if parameters to step on the device are cut by a dim."""
    for unit in plan.units:
        for layout in unit.trainable_layouts if unit.steps_on_device else ():
            spec = layout.extents[0].parameter
            if isinstance(spec.granularity, Dim) and not layout.is_extended:
                raise PlanError(
                    f"{spec.name} is cut by a dim (granularity='dim', or tensor parallelism): "
                    "torch's DTensors cannot have a gradient on the device and report the host; "
                    "use another granularity or CPUOffloadPolicy(step='host')"
                )


def watch(runtime: Runtime) -> None:
    """Have optimizers step the units of ``runtime`` on the device whose policy says so."""
    steps = DeviceSteps(runtime)
    for index, unit in enumerate(runtime.units):
        for flat in _offloaded(unit):
            for position, parameter in enumerate(flat.parameters):
                _places[parameter.sharding] = _Place(steps, index, weakref.ref(flat), position)
    _watch_optimizers()


def prefetch_states(optimizer: Optimizer, unit: Unit) -> "DeviceSteps | None":
    """In backward, begin to copy ``unit`` to the device if ``optimizer`` will step it there.

    Returns what must `finish` at the end of backward; None if the unit is not copied.
    """
    found = (_places.get(parameter.sharding) for parameter in unit.parameters)
    place = next((one for one in found if one is not None), None)
    if place is None:
        return None
    place.steps.prefetch_in_backward(optimizer, place.unit)
    return place.steps


@dataclass(frozen=True)
class _Place:
    """What steps a parameter on the device, and which parameter of which unit it is."""

    steps: "DeviceSteps"
    unit: int
    flat: "weakref.ref[FlatParameters]"  # the model has hooks on parameters
    position: int

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the parameter, and not another tensor that is sharded like it."""
        flat = self.flat()
        return flat is not None and flat.parameters[self.position].sharded is tensor


_places: "weakref.WeakKeyDictionary[Sharding, _Place]" = weakref.WeakKeyDictionary()


def _offloaded(unit: Unit) -> Iterator[FlatParameters]:
    """The trained parameters of ``unit`` that are in host memory."""
    if unit.plan.steps_on_device:
        for flat in unit.flats:
            if flat.gradients is not None and isinstance(flat.codec, HostCodec):
                yield flat


# -- one unit on the device ----------------------------------------------------------------------


@dataclass(eq=False)
class _OnDevice:
    """The shards and states of one unit on the device."""

    index: int
    optimizer: Optimizer
    shards: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # host, device
    parameters: list[Tensor] = field(default_factory=list)  # all of the shards
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # to the device, of the host
    stand_ins: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter
    groups: dict[int, list[Tensor]] = field(default_factory=dict)  # stand-ins by number of group
    states: dict[Tensor, State] = field(default_factory=dict)  # by parameter, on the device
    work: DeviceWork | None = None  # the copies to the device, later those to the host
    # Set if the program has used the tensors of the host since they were copied.
    is_stale: threading.Event = field(default_factory=threading.Event)


class DeviceSteps:
    """Steps the units of one model on the device."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.pools.device
        # Weak, because they have hooks on parameters.
        self._flats = [[weakref.ref(one) for one in _offloaded(unit)] for unit in runtime.units]
        self._ledger: Ledger = runtime.scheduler.ledger
        self._to_device, self._to_host = DeviceStream(self.device), DeviceStream(self.device)
        policies = (unit.plan.offload for unit in runtime.units)
        is_pinned = any(policy is not None and policy.pin_memory for policy in policies)
        self._is_pinned = is_pinned and is_accelerator(self.device)
        self._window: SteppedUnits[_OnDevice] = SteppedUnits(drop=_end_copies)
        self.is_in_backward = False  # units step in a backward, whose end calls `finish`

    def step(self, optimizer: Optimizer, indices: Sequence[int]) -> None:
        """Step the units at ``indices``, all of whose parameters with gradients are stepped."""
        groups = groups_of(optimizer)
        for position, index in enumerate(indices):
            current = self._window.ahead.pop(index, None)
            if current is None or current.optimizer is not optimizer:
                if current is not None:
                    _await_copies(current)
                self._window.make_room()
                current = self._copy_to_device(optimizer, index, groups)
            for following in indices[position + 1 : position + 2]:
                self._prefetch(optimizer, following, groups, others=1)
            if current.is_stale.is_set():
                self._fill(current)
            self._step(current)
            self._copy_to_host(current)

    def prefetch_in_backward(self, optimizer: Optimizer, index: int) -> None:
        """Begin to copy a unit to the device, unless others that were copied have not stepped.

        Until it steps, hooks may change its parameters and states; then it is copied again.
        """
        self.is_in_backward = True
        if index in self._window.ahead:
            return
        self._prefetch(optimizer, index, groups_of(optimizer))
        here = self._window.ahead.get(index)
        if here is not None:
            states = [optimizer.state.get(p, {}) for p in here.states]
            for tensor in (*here.parameters, *(one for state in states for one in state.values())):
                if isinstance(tensor, ShardedTensor):
                    notice_use(tensor, here.is_stale.set)  # keeps no memory of the device

    def _prefetch(
        self, optimizer: Optimizer, index: int, groups: dict[Tensor, int], *, others: int = 0
    ) -> None:
        if self._window.takes_ahead(index, others=others):
            self._window.make_room(others=others)
            self._window.ahead[index] = self._copy_to_device(optimizer, index, groups)

    def finish(self) -> None:
        """Make later work of the device wait for all copies, and free the memory on the device.

        Raises what a copy to the host has raised, after all.
        """
        self.is_in_backward = False
        for one in self._window:  # also those that have not stepped, after an error
            _await_copies(one)
        leaving = list(self._window.leaving)
        self._window.clear()
        for one in leaving:
            _end_copies(one)

    # -- copies ------------------------------------------------------------------------------------

    def _copy_to_device(
        self, optimizer: Optimizer, index: int, groups: dict[Tensor, int]
    ) -> _OnDevice:
        here = _OnDevice(index, optimizer)
        copies = here.copies
        for shard, parameters in self._shards(index):
            on_device = torch.empty_like(shard, device=self.device)
            copies.append((on_device, shard))
            here.shards.append((shard, on_device))
            for parameter, part in parameters:
                original = parameter.sharded
                here.parameters.append(original)
                number = groups.get(original)
                if number is None:
                    continue
                stand_in = _stand_in(parameter, on_device[part].data)
                here.stand_ins[original] = stand_in
                here.groups.setdefault(number, []).append(stand_in)
                group = optimizer.param_groups[number]
                here.states[original] = {
                    key: self._on_device(key, value, group, copies)
                    for key, value in optimizer.state.get(original, {}).items()
                }
        self._fill(here)
        return here

    def _shards(self, index: int) -> Iterator[tuple[Tensor, list[tuple[FSDPParameter, slice]]]]:
        """Each offloaded shard [S] of a unit, with the parameters in it."""
        for flat in [reference() for reference in self._flats[index]]:
            if flat is not None:
                slices = flat.layout.slices_of_shard(flat.mesh.rank)
                yield flat.codec.shard, list(zip(flat.parameters, slices, strict=True))

    def _fill(self, here: _OnDevice) -> None:
        """Copy the values of the host to the tensors on the device."""
        began = self._now()
        with self._to_device.enqueue(timed=self._ledger.is_timed) as here.work:
            for to, of in here.copies:
                copy_(to, of)
        here.is_stale.clear()
        self._record(EventKind.STATES_TO_DEVICE, here, here.copies, began)

    def _on_device(
        self, key: str, value: Any, group: State, copies: list[tuple[Tensor, Tensor]]
    ) -> Any:
        """A state on the device; its values come by ``copies``."""
        if not isinstance(value, Tensor):
            return value
        if _is_number(value):  # torch's optimizers choose where numbers are, most of them the host
            is_needed = key == "step" and (group.get("fused") or group.get("capturable"))
            return value.to(self.device, non_blocking=True) if is_needed else value
        local = _local(value)
        if local.device.type != "cpu":
            return value  # the program has put it there
        copies.append((torch.empty_like(local, device=self.device), local))
        return _with_local(value, copies[-1][0])

    def _copy_to_host(self, here: _OnDevice) -> None:
        began = self._now()
        copies = list(here.shards)
        written = list(here.parameters)  # with the shards, also those that were not stepped
        for original, state in here.states.items():
            if not state and original not in here.optimizer.state:
                continue  # do not create an entry
            host = here.optimizer.state[original]
            for key in [key for key in host if key not in state]:
                del host[key]
            for key, value in state.items():
                if isinstance(value, Tensor) and not _is_number(value):
                    host[key] = self._host_copy(host.get(key), value)
                    written.append(host[key])
                    copies.append((_local(host[key]), _local(value)))
                else:
                    host[key] = value
        with self._to_host.enqueue(timed=self._ledger.is_timed) as here.work:
            for to, of in copies:
                copy_(to, of)
        for tensor in written:
            if isinstance(tensor, ShardedTensor):
                arrives(tensor, here.work.synchronize)
        if not all(isinstance(tensor, ShardedTensor) for tensor in written):
            here.work.synchronize()  # operators of torch read these without asking
        self._record(EventKind.STATES_TO_HOST, here, copies, began)
        self._window.leaving.append(here)

    def _host_copy(self, before: object, value: Tensor) -> Tensor:
        """Memory of the host for ``value``: that of ``before`` if it fits."""
        local = _local(value)
        if isinstance(before, Tensor) and type(before) is type(value):
            known = _local(before)
            fits = (known.shape, known.dtype) == (local.shape, local.dtype)
            if fits and known.device.type == "cpu" and known.is_pinned() == self._is_pinned:
                return before
        host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=self._is_pinned)
        return _with_local(value, host)

    # -- the step ----------------------------------------------------------------------------------

    def _step(self, here: _OnDevice) -> None:
        optimizer = here.optimizer
        assert here.work is not None
        here.work.wait_on_device()
        for original, stand_in in here.stand_ins.items():
            stand_in.grad = self._gradient_for(original)
            if here.states[original]:
                optimizer.state[stand_in] = here.states[original]
        try:
            step_only(optimizer, here.groups)
        finally:
            for original, stand_in in here.stand_ins.items():
                stand_in.grad = None  # its memory belongs to the backward
                here.states[original] = optimizer.state.pop(stand_in, {})
        for original in here.stand_ins:
            torch.autograd.graph.increment_version(original)

    def _gradient_for(self, original: Tensor) -> Tensor | None:
        gradient, sharding = original.grad, sharding_of(original)
        if gradient is None:
            return None
        assert sharding is not None
        local = _local(gradient).to(self.device, non_blocking=True)
        return sharding.wrap_gradient(local.reshape(-1))

    # -- the ledger --------------------------------------------------------------------------------

    def _now(self) -> Any:
        return self._ledger.clock() if self._ledger.is_timed else NO_TIME

    def _record(
        self, kind: EventKind, here: _OnDevice, copies: list[tuple[Tensor, Tensor]], began: Any
    ) -> None:
        assert here.work is not None
        event = Event(kind, here.index, sum(to.nbytes for to, _ in copies))
        self._ledger.append(Record(event, self._ledger.step, began, self._now(), (here.work,)))


def _await_copies(one: _OnDevice) -> None:
    """Make the current stream, on which the memory of a unit is freed, wait for its copies."""
    assert one.work is not None
    one.work.wait()


def _end_copies(one: _OnDevice) -> None:
    """Do the same, or raise what a copy has raised."""
    _await_copies(one)
    assert one.work is not None
    if one.work.error is not None:
        raise one.work.error


def _is_number(value: Tensor) -> bool:
    """Whether a state is a number and not the state of a parameter without dims."""
    return not value.ndim and not isinstance(value, DTensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor distributed as ``tensor``, of which this rank has ``local``."""
    if not isinstance(tensor, DTensor):
        return local
    made = new_dtensor(type(tensor), local, tensor._spec)
    if isinstance(tensor, ShardedTensor):
        made._sharding = tensor.sharding  # type: ignore[attr-defined]
    return made


def _stand_in(parameter: FSDPParameter, local: Tensor) -> Tensor:
    """A parameter on the device, for the optimizer."""
    original = parameter.sharded
    made = nn.Parameter(parameter.sharding.wrap(local), requires_grad=True)
    parameter.sharding.attach_to(made)
    vars(made).update(attributes_of(original))
    if original.grad is not None and original.grad.dtype != made.dtype:
        made.grad_dtype = original.grad.dtype
    return made


# -- steps of optimizers -------------------------------------------------------------------------


@dataclass(eq=False)
class _Watched:
    """An optimizer that steps units on the device."""

    hook: Any  # before its steps
    hidden: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # gradients, during a step
    is_stepping: bool = False  # units, now


_watched: "weakref.WeakKeyDictionary[Optimizer, _Watched]" = weakref.WeakKeyDictionary()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_watch_optimizer)


def _watch_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step units on the device after all other hooks, such as those that save what will change."""
    watched = _watched.get(optimizer)
    if watched is not None:
        if watched.is_stepping:
            raise StepError(
                f"{type(optimizer).__name__}.step() calls step() of another class, whose hooks "
                "would run once per unit; pass CPUOffloadPolicy(step='host') to fully_shard"
            )
        watched.hook.remove()
        watched.hook = optimizer.register_step_pre_hook(_step_on_device)  # the last one
    elif any(_place_of(p) for group in optimizer.param_groups for p in group["params"]):
        check_elementwise(optimizer)
        optimizer.register_state_dict_pre_hook(_await_states)
        after: Any = optimizer.register_step_post_hook(_show_gradients)
        after.hooks_dict_ref().move_to_end(after.id, last=False)  # others see gradients
        _watched[optimizer] = _Watched(optimizer.register_step_pre_hook(_step_on_device))


def _await_states(optimizer: Optimizer) -> None:
    """Wait for states: a state dict is read without `local_of`."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, ShardedTensor):
                local_of(value)


def _place_of(parameter: Tensor) -> _Place | None:
    """What steps ``parameter`` on the device, if it is a parameter that is stepped there."""
    sharding = sharding_of(parameter)
    place = None if sharding is None else _places.get(sharding)
    return place if place is not None and place.holds(parameter) else None


@torch.no_grad()
def _step_on_device(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: State
) -> tuple[tuple[Any, ...], State]:
    watched = _watched[optimizer]
    if len(args) > 2 or kwargs.keys() - {"closure"}:  # noqa: PLR2004 - itself and the closure
        raise StepError(
            f"{type(optimizer).__name__}.step: with CPUOffloadPolicy(step='device'), expected no "
            "argument but closure; pass step='host' to use others"
        )
    args, kwargs = with_evaluated_closure(args, kwargs)
    watched.is_stepping = True
    try:
        stepped = _step_units(optimizer)
    finally:
        watched.is_stepping = False
    watched.hidden = [(p, p.grad) for p in stepped if p.grad is not None]
    for parameter in stepped:  # nothing is left for the optimizer to step
        parameter.grad = None
    return args, kwargs


def _step_units(optimizer: Optimizer) -> list[Tensor]:
    """Step all parameters if some are stepped on the device, and return them."""
    units: dict[DeviceSteps, set[int]] = {}
    others: dict[int, list[Tensor]] = {}
    stepped: list[Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in [p for p in group["params"] if p.grad is not None]:
            stepped.append(parameter)
            place = _place_of(parameter)
            if place is None:
                others.setdefault(number, []).append(parameter)
            else:
                units.setdefault(place.steps, set()).add(place.unit)
    if not units:
        return []
    with one_step_at_a_time(optimizer, 'pass CPUOffloadPolicy(step="host") to fully_shard'):
        for steps, indices in units.items():
            try:
                steps.step(optimizer, sorted(indices))
            finally:
                if not steps.is_in_backward:
                    steps.finish()
        if others:
            step_only(optimizer, others)
    return stepped


def _show_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    watched = _watched[optimizer]
    hidden, watched.hidden = watched.hidden, []
    for parameter, gradient in hidden:
        parameter.grad = gradient


def arrives(tensor: DTensor, wait: Callable[[], None]) -> None:
    """Have `local_of` call ``wait`` before it returns the local tensor, which is in host memory."""
    vars(tensor._local_tensor)[BEFORE_USE] = wait


def notice_use(tensor: DTensor, note: Callable[[], None]) -> None:
    """Have `local_of` call ``note`` when it next returns the local tensor, after a wait."""
    wait = vars(tensor._local_tensor).get(BEFORE_USE)

    def both() -> None:
        note()
        if wait is not None:
            wait()

    vars(tensor._local_tensor)[BEFORE_USE] = both
