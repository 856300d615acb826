"""The optimizer's step on the device, for shards and states in host memory.

With ``CPUOffloadPolicy(step="device")``, `torch.optim.Optimizer.step` brings one unit after the
other to the device and steps it there, with stand-ins for its parameters in the optimizer's groups.
Each direction has a stream of its own, and at most `MAX_STEPPED_UNITS` units are on the device::

    to device  | unit 1 | unit 2 | unit 3 |
    compute             | step 1 | step 2 | step 3 |
    to host                      | unit 1 | unit 2 | unit 3 |

The host does not wait. A tensor that is still being written remembers that (`arrives`), and
`local_of` waits for it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import new_dtensor
from shardwise.comm.device import NO_TIME, DeviceStream, DeviceWork, copy_, is_accelerator
from shardwise.errors import PlanError, StepError
from shardwise.plan.offload import MAX_STEPPED_UNITS
from shardwise.runtime.codecs import HostCodec
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import Ledger, Record
from shardwise.runtime.parameters import FSDPParameter, attributes_of
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.schedule.events import Event, EventKind
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import Sharding, arrives, sharding_of

__all__ = ["DeviceSteps", "one_step_at_a_time", "prefetch_states", "watch"]

State = dict[str, Any]  # of one parameter


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
    place.steps.prefetch(optimizer, place.unit)
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
_hooks: "weakref.WeakKeyDictionary[Optimizer, Any]" = weakref.WeakKeyDictionary()
_hidden: "weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


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
    stand_ins: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter
    states: dict[Tensor, State] = field(default_factory=dict)  # by parameter, on the device
    work: DeviceWork | None = None  # the copies to the device, later those to the host


class DeviceSteps:
    """Steps the units of one model on the device."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.pools.device
        self._units = [_UnitOnHost(unit) for unit in runtime.units]
        self._ledger: Ledger = runtime.scheduler.ledger
        self._to_device, self._to_host = DeviceStream(self.device), DeviceStream(self.device)
        policies = (unit.plan.offload for unit in runtime.units)
        is_pinned = any(policy is not None and policy.pin_memory for policy in policies)
        self._is_pinned = is_pinned and is_accelerator(self.device)
        self._scheduler = weakref.ref(runtime.scheduler)
        self._ahead: dict[int, _OnDevice] = {}  # by unit: brought before its step
        self._leaving: deque[_OnDevice] = deque()

    def step(self, optimizer: Optimizer, indices: Sequence[int]) -> None:
        """Step the units at ``indices``, all of whose parameters with gradients are stepped."""
        for position, index in enumerate(indices):
            current = self._ahead.pop(index, None)
            if current is None or current.optimizer is not optimizer:
                self._drop(current)
                self._make_room()
                current = self._copy_to_device(optimizer, index)
            for following in indices[position + 1 : position + 2]:
                self.prefetch(optimizer, following, beside=1)
            self._step(current)
            self._copy_to_host(current)

    def prefetch(self, optimizer: Optimizer, index: int, *, beside: int = 0) -> None:
        """Begin to copy a unit to the device, unless others that were copied have not stepped."""
        if index in self._ahead:
            return
        if len(self._ahead) + beside + 1 < MAX_STEPPED_UNITS:
            self._make_room(beside)
            self._ahead[index] = self._copy_to_device(optimizer, index)

    @property
    def in_backward(self) -> bool:
        """Whether units step in backward, whose end calls `finish`."""
        scheduler = self._scheduler()
        return scheduler is not None and scheduler.steps_in_backward

    def finish(self) -> None:
        """Make later work of the device wait for all copies, and free the memory on the device."""
        for one in self._ahead.values():  # not stepped, after an error
            self._drop(one)
        self._ahead.clear()
        while self._leaving:
            self._drop(self._leaving.popleft())

    # -- copies ------------------------------------------------------------------------------------

    def _make_room(self, beside: int = 0) -> None:
        while self._leaving and len(self._ahead) + len(self._leaving) + beside >= MAX_STEPPED_UNITS:
            self._drop(self._leaving.popleft())

    @staticmethod
    def _drop(one: "_OnDevice | None") -> None:
        """Make the current stream, on which its memory is freed, wait for its copies."""
        if one is not None and one.work is not None:
            one.work.wait()

    def _copy_to_device(self, optimizer: Optimizer, index: int) -> _OnDevice:
        unit, began = self._units[index], self._now()
        here = _OnDevice(index, optimizer)
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        copies: list[tuple[Tensor, Tensor]] = []
        for shard, parameters in unit.shards():
            on_device = torch.empty_like(shard, device=self.device)
            copies.append((on_device, shard))
            here.shards.append((shard, on_device))
            for parameter, part in parameters:
                original = parameter.sharded
                if original not in groups:
                    continue
                here.stand_ins[original] = _stand_in(parameter, on_device[part].data)
                state = optimizer.state.get(original, {})
                here.states[original] = {
                    key: self._on_device(key, value, groups[original], copies)
                    for key, value in state.items()
                }
        with self._to_device.enqueue(timed=self._ledger.is_timed) as here.work:
            for to, of in copies:
                copy_(to, of)
        self._record(EventKind.STATES_TO_DEVICE, here, copies, began)
        return here

    def _on_device(
        self, key: str, value: Any, group: State, copies: list[tuple[Tensor, Tensor]]
    ) -> Any:
        """A state on the device; its values come by ``copies``."""
        if not isinstance(value, Tensor):
            return value
        if not value.ndim:  # torch's optimizers choose where numbers are, most of them the host
            is_needed = key == "step" and (group.get("fused") or group.get("capturable"))
            return value.to(self.device, non_blocking=True) if is_needed else value
        local = _local(value)
        if local.device.type != "cpu":
            return value  # the program has put it there
        copies.append((torch.empty_like(local, device=self.device), local))
        return _with_local(value, copies[-1][0])

    def _copy_to_host(self, here: _OnDevice) -> None:
        began = self._now()
        copies = [(shard, on_device) for shard, on_device in here.shards]
        written: list[Tensor] = list(here.stand_ins)
        for original, state in here.states.items():
            host = here.optimizer.state[original]
            for key in [key for key in host if key not in state]:
                del host[key]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    host[key] = self._host_copy(host.get(key), value)
                    written.append(host[key])
                    copies.append((_local(host[key]), _local(value)))
                else:
                    host[key] = value
        with self._to_host.enqueue(timed=self._ledger.is_timed) as here.work:
            for to, of in copies:
                copy_(to, of)
        for tensor in written:
            arrives(tensor, here.work.synchronize)
        if not all(isinstance(tensor, ShardedTensor) for tensor in written):
            here.work.synchronize()  # operators of torch read these without asking
        self._record(EventKind.STATES_TO_HOST, here, copies, began)
        self._leaving.append(here)

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
        lists = [(group, group["params"]) for group in optimizer.param_groups]
        try:
            for group, originals in lists:
                group["params"] = [here.stand_ins[p] for p in originals if p in here.stand_ins]
            with one_step_at_a_time(optimizer, 'pass CPUOffloadPolicy(step="host") to fully_shard'):
                _step_without_hooks(optimizer)
        finally:
            for group, originals in lists:
                group["params"] = originals
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


class _UnitOnHost:
    """The offloaded shards of a unit; refers to the unit weakly, as it has hooks on parameters."""

    def __init__(self, unit: Unit) -> None:
        self._flats = [weakref.ref(flat) for flat in _offloaded(unit)]

    def shards(self) -> Iterator[tuple[Tensor, list[tuple[FSDPParameter, slice]]]]:
        """Each shard [S], with the parameters in it."""
        for reference in self._flats:
            flat = reference()
            if flat is not None:
                slices = flat.layout.slices_of_shard(flat.mesh.rank)
                yield flat.shard, list(zip(flat.parameters, slices, strict=True))


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


# -- optimizers ----------------------------------------------------------------------------------


@contextmanager
def one_step_at_a_time(optimizer: Optimizer, way_out: str) -> Iterator[None]:
    """Raise a StepError if stepping one unit changes the options of a group."""
    before = _options_of(optimizer)
    yield
    changed = {
        key
        for old, new in zip(before, _options_of(optimizer), strict=True)
        for key in new
        if key not in old or not _is_same(old[key], new[key])
    }
    if changed:
        raise StepError(
            f"{type(optimizer).__name__} changed {', '.join(sorted(changed))} of its param_groups "
            f"in the step of one unit, so it would count units instead of steps; {way_out}"
        )


def _options_of(optimizer: Optimizer) -> list[State]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _is_same(old: object, new: object) -> bool:
    return old is new or (type(old) is type(new) and isinstance(new, (int, float)) and old == new)


def _step_without_hooks(optimizer: Optimizer) -> None:
    """Step; the hooks run once for all units. torch wraps ``step`` in what calls them."""
    step: Callable[[Optimizer], object] = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _watch_optimizers() -> None:
    global _is_watching  # noqa: PLW0603
    if not _is_watching:
        register_optimizer_step_pre_hook(_watch_optimizer)
        _is_watching = True


_is_watching = False


def _watch_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step units on the device after all other hooks, such as those that save what will change."""
    before = _hooks.pop(optimizer, None)
    if before is not None:
        before.remove()
    elif any(_place_of(p) for group in optimizer.param_groups for p in group["params"]):
        optimizer.register_step_post_hook(_show_gradients)
    else:
        return
    _hooks[optimizer] = optimizer.register_step_pre_hook(_step_on_device)  # the last one


def _place_of(parameter: Tensor) -> _Place | None:
    """What steps ``parameter`` on the device, if it is a parameter that is stepped there."""
    sharding = sharding_of(parameter)
    place = None if sharding is None else _places.get(sharding)
    return place if place is not None and place.holds(parameter) else None


@torch.no_grad()
def _step_on_device(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: State
) -> tuple[tuple[Any, ...], State]:
    if getattr(optimizer, "needs_all_units", False):
        raise PlanError(
            f"{type(optimizer).__name__}: works on whole matrices that ranks exchange, not on "
            "units; pass CPUOffloadPolicy(step='host'), with which their owners compute on the "
            "device as well"
        )
    args, kwargs = _with_evaluated_closure(args, kwargs)
    units: dict[DeviceSteps, set[int]] = {}
    _hidden[optimizer] = hidden = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            place = _place_of(parameter)
            if place is not None and parameter.grad is not None:
                units.setdefault(place.steps, set()).add(place.unit)
                hidden.append((parameter, parameter.grad))
    for steps, indices in units.items():
        try:
            steps.step(optimizer, sorted(indices))
        finally:
            if not steps.in_backward:
                steps.finish()
    for parameter, _ in hidden:  # the optimizer now steps all others
        parameter.grad = None
    return args, kwargs


def _with_evaluated_closure(args: tuple[Any, ...], kwargs: State) -> tuple[tuple[Any, ...], State]:
    """Replace a closure among the arguments of ``step`` by its result."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss, *args[2:]), kwargs


def _show_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for parameter, gradient in _hidden.pop(optimizer, ()):
        parameter.grad = gradient
