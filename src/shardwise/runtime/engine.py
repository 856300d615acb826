"""`fully_shard`: attaches a plan to a module.

The way of a parameter from here to the first all-gather: `fully_shard` makes a `Runtime`, whose
`FSDPModule.__call__` enters the unit in `scheduler`, which asks `schedule.sequencer` what must
happen and has `unit` launch the gather on a link of `transport.collectives`.
"""

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.plan.granularity import Granularities
from shardwise.plan.layout import ParameterSpec
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.padding import padding_report
from shardwise.plan.plan import Plan, UnitChoice, make_plan
from shardwise.plan.precision import AS_IT_CAME, MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy, resolve_strategy
from shardwise.plan.units import UnitPlan, Units, check_is_unit
from shardwise.runtime import hooks
from shardwise.runtime.attach import (
    check_initialized,
    check_same_plan,
    check_same_sums,
    check_same_values,
    device_for,
    is_on_meta,
    make_unit,
    move_buffers,
)
from shardwise.runtime.buffer import Pool, Pools
from shardwise.runtime.casting import apply_precision, cast_tensors
from shardwise.runtime.controls import HANDLE, Controls
from shardwise.runtime.in_slot import let_compute_in_slot, offer_slot
from shardwise.runtime.initialize import Initialization, Materializer
from shardwise.runtime.ledger import Ledger
from shardwise.runtime.mesh import Axis, resolve_mesh
from shardwise.runtime.offload import Ferry
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.tensor import ShardedTensor
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.runtime.unused import UNUSED, Unused
from shardwise.schedule.sequencer import Call, Outcome

__all__ = [
    "FSDPModule",
    "Runtime",
    "fully_shard",
    "gathered",
    "ledger",
    "register_forward_method",
    "runtime_of_root",
]

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Strategy = "fsdp",
    units: Units = None,
    prefetch: int = 1,
    reshard_after_forward: bool | int | None = None,
    sharding_factor: int | None = None,
    granularity: Granularities = "element",
    mp_policy: MixedPrecisionPolicy = AS_IT_CAME,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    unused: Unused = "none",
    init: Initialization | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
) -> M:
    """Shard ``module`` over the ranks of ``mesh``; returns the same object.

    Its parameters become `ShardedTensor`s in place, so names, ties and an optimizer that was built
    before stay right. A unit is gathered just before it computes and freed right after, in forward
    and backward. Call it once with ``units``, or as in FSDP2 once for each block and then for the
    root.

    Args:
        module: the model, with the same values on every rank, or on the meta device.
        mesh: one-dimensional; None for all ranks (this process alone without a process group).
            Two-dimensional, (outer, inner), for strategies over two axes.
        strategy: what is sharded over which axis: a row of `plan.strategy.PRESETS` by its name, or
            a `Strategy` of your own.
        units: a module class or set of classes, ``"auto"`` (the repeated blocks), a size in
            parameters, or a policy ``(module, recurse, nonwrapped_numel) -> bool``.
        prefetch: how many units to gather ahead of the one that computes.
        reshard_after_forward: free units after forward and gather them again for backward; None
            does so for all but the root. A number keeps as much of them as lets groups of that
            many neighbouring ranks gather them among themselves.
        sharding_factor: in the place of a two-dimensional mesh: the ranks, neighbours, that share
            one copy of the model; divides the number of ranks.
        granularity: where a parameter may be cut between ranks: ``"element"`` (anywhere),
            ``"row"`` (between slices along dim 0), `sw.block(n)` (between blocks of n rows) or
            ``"tensor"`` (nowhere); one for all, or a mapping from patterns of names (as in
            fnmatch; the first that fits decides), or a function of name and shape. Others are by
            element. What an earlier call for a block chose, stays. Costly padding is warned of.
        mp_policy: the dtypes of gathers, compute, reductions and shards. Without one, only
            trainable parameters in bfloat16 or float16 get float32 shards ("masters").
        offload_policy: ``sw.CPUOffloadPolicy()`` keeps shards, their gradients and the states of
            the optimizer in the memory of the host; compute stays where it is.
        unused: the gradient of a parameter that no rank used in a step: ``"none"`` leaves it None,
            as one process would; ``"zeros"`` spares the ranks the small exchange about it;
            ``"error"`` has every rank raise a `StepError` at the end of a backward in which some
            rank gave no gradient to a parameter that requires one. It names both.
        init: how a model on the meta device gets its first values, the same ones on any number of
            ranks: one unit after the other is made whole, initialised and cut, so that the peak of
            memory is the shards and one unit. None is ``Initialization(seed=0)``.
        ignored_params: parameters of ``module`` that are left alone: whole, each rank's own, with
            gradients that nobody reduces. As in FSDP2; a call for an enclosing module has to name
            them again.

    Raises:
        PlanError: the arguments do not fit the model or each other.

    Source: Zhao et al., PyTorch FSDP, 2023 (arXiv 2304.11277).
    """
    if not isinstance(module, nn.Module):
        raise PlanError(f"fully_shard takes a torch.nn.Module, got {type(module).__name__}")
    if unused not in UNUSED:
        raise PlanError(f"unused={unused!r}: expected one of {', '.join(UNUSED)}")
    if isinstance(module, FSDPModule):
        raise PlanError(f"{type(module).__name__} is sharded already; shard the root last and once")
    check_is_unit(module, "")
    check_initialized(module)
    strategy = resolve_strategy(strategy)
    axis = resolve_mesh(mesh, strategy, sharding_factor)
    is_meta = _check_init(module, init)
    manual = _sharded_before(module)
    plan = make_plan(
        module,
        world_size=axis.size,
        units=units,
        strategy=strategy,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        replicas=len(axis.rows),
        granularity=granularity,
        manual=manual,
        precision=mp_policy,
        offload=offload_policy,
        settled=_specs_before(module),
        ignored=_names_of(module, ignored_params or ()),
    )
    _warn_of_padding(plan, axis)
    if is_meta and init is None:
        init = Initialization()
    runtime = Runtime(module, plan, axis, unused, init)
    own = UnitChoice(reshard_after_forward, mp_policy, offload_policy)
    inner = UnitChoice(reshard_after_forward, replace(mp_policy, output_dtype=None), offload_policy)
    for index, unit in enumerate(plan.units):
        choice = manual.get(unit.name, inner if index else own)
        _mark(module.get_submodule(unit.name), Handle(runtime, index, choice))
    apply_precision(module, mp_policy, settled=manual)
    for part in module.modules():
        let_compute_in_slot(part)
    return module


def ledger(module: nn.Module) -> Ledger:
    """The record of what ``module`` (sharded by `fully_shard`) moved, and when."""
    return _handle_of(module).runtime.scheduler.ledger


def runtime_of_root(module: nn.Module) -> "Runtime":
    """What runs ``module``, which has to be a sharded model and not a unit inside one.

    Raises:
        PlanError: it is not.
    """
    handle = _handle_of(module)
    if handle.index:
        name = handle.runtime.plan.units[handle.index].name
        raise PlanError(f"{name} is a unit inside a sharded model; pass the whole model")
    return handle.runtime


@contextlib.contextmanager
def gathered(module: nn.Module, *, write_back: bool = False) -> Iterator[None]:
    """Within it, all parameters of the model are whole, plain tensors; all ranks have to enter.

    Forward works within it, without gradients. Changes are dropped at the end unless
    ``write_back``, in which case every rank has to make the same ones.

    Raises:
        StepError: a forward or backward is under way.
    """
    scheduler = _handle_of(module).runtime.scheduler
    scheduler.hold()
    try:
        yield
    finally:
        scheduler.release(write_back=write_back)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have ``module.name(...)`` gather the unit ``module`` as calling it does: ``generate``, say.

    Raises:
        PlanError: ``module`` is not a unit, or its class has no such method.
    """
    _handle_of(module)
    plain = _plain_class(type(module))
    if not callable(getattr(plain, name, None)):
        raise PlanError(f"{plain.__name__} has no method {name!r}")
    methods: frozenset[str] = getattr(type(module), _METHODS)
    module.__class__ = _fsdp_class(plain, methods | {name})  # type: ignore[arg-type]


class FSDPModule(Controls):
    """What `fully_shard` makes of a module: ``isinstance(module, FSDPModule)`` tells a unit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = _handle_of(self)
        return handle.runtime.call(handle, self, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A sharded copy of its own; the root of the model has to be in what is copied."""
        handle = _handle_of(self)
        runtime = handle.runtime
        if handle.index == 0:
            memo[id(runtime)] = runtime
        elif id(runtime) not in memo:
            name = runtime.plan.units[handle.index].name
            raise PlanError(f"{name} is a unit inside a sharded model; copy the whole model")
        plain = _plain_class(type(self))
        twin: nn.Module = plain.__new__(plain)
        memo[id(self)] = twin
        state = {key: value for key, value in self.__dict__.items() if key != HANDLE}
        twin.__dict__.update(copy.deepcopy(state, memo))
        if handle.index == 0:
            runtime.attach_to(twin, self)
        return twin


@dataclass(frozen=True)
class Handle:
    """How a module finds its unit."""

    runtime: "Runtime"
    index: int
    choice: UnitChoice  # as the user said it


class Runtime:
    """One sharded model: its plan, its units, and the scheduler that runs them.

    The modules hold it; it holds no module, so that a model that is deleted frees its memory.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        axis: Axis,
        unused: Unused,
        init: Initialization | None = None,
    ) -> None:
        self.gave_values = init is not None  # to the parameters, which had none
        check_same_plan(plan, axis)
        self.plan = plan
        self.axis = axis
        self._unused: Unused = unused
        device = device_for(root, axis)
        self.pools = Pools(device)
        self._ferries: dict[CPUOffloadPolicy, Ferry] = {}
        if init is None:
            check_same_values(root, plan, axis)
            self.units = [self._make_unit(root, unit) for unit in plan.units]
        else:
            self.units = self._materialize(root, init)
        move_buffers(root, device)
        self.scheduler = Scheduler(plan, self.units, axis, device, unused)
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
        """Run the forward of a unit with its parameters gathered."""
        scheduler, index, precision = self.scheduler, handle.index, handle.choice.precision
        task = hooks.current_task()
        if task != hooks.NO_TASK:
            _join_backward(scheduler, task)
        call = scheduler.enter(index, recomputed=task != hooks.NO_TASK)
        if call is None:
            with torch.no_grad():
                return forward(*args, **kwargs)
        if precision.cast_forward_inputs and precision.param_dtype is not None:
            args, kwargs = cast_tensors((args, kwargs), precision.param_dtype)
        try:
            output = forward(*args, **kwargs)
            if precision.output_dtype is not None:
                output = cast_tensors(output, precision.output_dtype)
            outcome = hooks.watch_outputs(
                output,
                hooks.tensors_left_in(module, FSDPModule),
                partial(_begin_backward, scheduler, call),
                trainable=self.plan.units[index].gradient_bytes > 0,
            )
        except BaseException as error:
            scheduler.leave(call, Outcome.FAILED, error)
            raise
        scheduler.leave(call, outcome)
        return output

    def attach_to(self, twin: nn.Module, root: nn.Module) -> None:
        """Shard ``twin``, a copy of ``root``, in the same way."""
        runtime = Runtime(twin, self.plan, self.axis, self._unused)
        for index, unit in enumerate(self.plan.units):
            original = root.get_submodule(unit.name)
            handle = Handle(runtime, index, _handle_of(original).choice)
            _mark(twin.get_submodule(unit.name), handle, getattr(type(original), _METHODS))

    def _materialize(self, root: nn.Module, init: Initialization) -> list[Unit]:
        """The units of a model on the meta device, those inside others first."""
        materializer = Materializer(root, self.plan, init, Pool(self.pools.device))
        units = [
            self._make_unit(root, unit, materializer.fill) for unit in reversed(self.plan.units)
        ]
        materializer.take_back()
        check_same_sums(materializer.checksums, self.axis)
        return units[::-1]

    def _make_unit(
        self, root: nn.Module, plan: UnitPlan, fill: Callable[[UnitPlan], None] = lambda _: None
    ) -> Unit:
        offload = plan.offload
        if offload is not None and offload not in self._ferries:
            self._ferries[offload] = Ferry(self.pools.device, offload)
        ferry = self._ferries[offload] if offload is not None else None
        return make_unit(root, plan, self.axis, self.pools, ferry, fill)

    def _listen(self, index: int, unit: Unit) -> None:
        scheduler = weakref.ref(self.scheduler)
        for flat in unit.flats:
            for position, parameter in enumerate(flat.parameters):
                accept = partial(_accept, scheduler, index, weakref.ref(flat), position)
                hooks.on_gradient(parameter.dense, accept)
                claim = partial(_claim_slot, scheduler, index, weakref.ref(flat), position)
                offer_slot(parameter.dense, claim)


# -- backward ------------------------------------------------------------------------------------


def _begin_backward(scheduler: Scheduler, call: Call) -> None:
    task = hooks.current_task()
    hooks.check_first_order()
    _join_backward(scheduler, task)
    scheduler.before_backward(call, task)


def _join_backward(scheduler: Scheduler, task: int) -> None:
    """Have ``scheduler`` know when graph task ``task`` ends, which may have others inside it."""
    if not scheduler.is_walking(task):
        hooks.at_end_of_backward(
            partial(scheduler.finish_backward, task), partial(scheduler.abandon_backward, task)
        )
        scheduler.join_backward(task)


def _accept(
    scheduler_ref: "weakref.ref[Scheduler]",
    index: int,
    flat_ref: "weakref.ref[FlatParameters]",
    position: int,
) -> None:
    scheduler, flat = scheduler_ref(), flat_ref()
    if scheduler is None or flat is None:
        return  # the model is gone, and its graph outlived it
    hidden = scheduler.hidden_call(index)
    if hidden is not None:
        _begin_backward(scheduler, hidden)
    scheduler.units[index].accept(flat, position)


def _claim_slot(
    scheduler_ref: "weakref.ref[Scheduler]",
    index: int,
    flat_ref: "weakref.ref[FlatParameters]",
    position: int,
) -> tuple[Tensor, bool] | None:
    scheduler, flat = scheduler_ref(), flat_ref()
    if scheduler is None or flat is None:
        return None
    return scheduler.units[index].claim_slot(flat, position)


# -- attaching -----------------------------------------------------------------------------------

_METHODS = "_shardwise_methods"  # those that gather the unit as forward does


def _handle_of(module: nn.Module) -> Handle:
    handle = module.__dict__.get(HANDLE)
    if handle is None:
        raise PlanError(f"{type(module).__name__} is not sharded; call sw.fully_shard on it first")
    assert isinstance(handle, Handle)
    return handle


def _names_of(root: nn.Module, parameters: Collection[nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    named = root.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in wanted}


def _mark(module: nn.Module, handle: Handle, methods: frozenset[str] = frozenset()) -> None:
    module.__dict__[HANDLE] = handle
    if not isinstance(module, FSDPModule):
        module.__class__ = _fsdp_class(type(module), methods)  # type: ignore[arg-type]


@cache
def _fsdp_class(plain: Any, methods: frozenset[str]) -> type[nn.Module]:
    contents: dict[str, Any] = {"__module__": plain.__module__, _METHODS: methods}
    contents |= {name: _as_forward(getattr(plain, name)) for name in methods}
    return type(f"FSDP{plain.__name__}", (FSDPModule, plain), contents)


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = _handle_of(self)
        return handle.runtime.call(handle, self, partial(method, self), args, kwargs)

    return call


def _plain_class(sharded: type[nn.Module]) -> type[nn.Module]:
    return cast("type[nn.Module]", sharded.__bases__[1])


def _specs_before(root: nn.Module) -> dict[str, ParameterSpec]:
    """What was planned for parameters that are sharded already."""
    sharded = {n: p.sharding for n, p in root.named_parameters() if isinstance(p, ShardedTensor)}
    return {name: sharding.extent.parameter for name, sharding in sharded.items()}


def _warn_of_padding(plan: Plan, axis: Axis) -> None:
    told = padding_report(plan.units) if axis.group_rank == 0 else ""
    if told:
        warnings.warn(f"granularity costs padding\n{told}", stacklevel=3)


def _sharded_before(root: nn.Module) -> dict[str, UnitChoice]:
    """Units that were made one by one, as in FSDP2, and what was chosen for each."""
    handles = {
        name: _handle_of(module)
        for name, module in root.named_modules()
        if isinstance(module, FSDPModule)
    }
    for name, handle in handles.items():
        if handle.runtime.gave_values:
            raise PlanError(
                f"{name} was initialised on its own, by the names inside it, so that blocks of one "
                "kind have the same values; shard a model on the meta device with one call, as in "
                "sw.fully_shard(model, units=Block)"
            )
    return {name: handle.choice for name, handle in handles.items()}


def _check_init(module: nn.Module, init: Initialization | None) -> bool:
    """Whether ``module`` is on the meta device.

    Raises:
        PlanError: it is not, but is to be initialised.
    """
    is_meta = is_on_meta(module)
    if init is not None and not is_meta:
        raise PlanError(
            "init=... is for a model on the meta device, and this one has values; to replace them, "
            "call sw.initialize(model, seed) before fully_shard"
        )
    return is_meta
