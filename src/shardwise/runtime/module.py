"""`FSDPModule`, the class of sharded modules, with FSDP2's methods.

Prefetching follows the recorded order of the last pass, so FSDP2's prefetch hints are accepted and
ignored.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _private
from shardwise.comm.communicator import communicator
from shardwise.comm.registered_memory import MemoryKind
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.plan.options import UnitSettings
from shardwise.plan.plan import Plan
from shardwise.plan.units import named_parameters
from shardwise.runtime import compiler
from shardwise.runtime.accumulation import dtype_of_gradient, is_unreduced
from shardwise.runtime.attach import settings_of
from shardwise.runtime.engine import HANDLE, Handle, Runtime
from shardwise.runtime.ledger import Ledger
from shardwise.runtime.parameters import attributes_of
from shardwise.schedule.events import EventKind
from shardwise.tensor.sharding import AssignableDTensor, sharding_of

__all__ = [
    "FSDPModule",
    "MethodWrappers",
    "UnshardHandle",
    "become_unit",
    "handle_of",
    "keeping_gradients",
    "ledger",
    "make_room_for_unfrozen",
    "mean_over_replicas",
    "normal_tensors",
    "register_forward_method",
    "runtime_of_root",
    "runtimes_in",
    "set_managed",
]

_NO_BACKEND = "is not supported; choose a backend by the process group of the mesh"
# (name of a method of a unit's class, function that wraps the method)
MethodWrappers = frozenset[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]]

_METHODS = "_shardwise_methods"  # the `MethodWrappers` of a class


def ledger(module: nn.Module) -> Ledger:
    """The record of what the sharded ``module`` moved, and when."""
    return handle_of(module).runtime.scheduler.ledger


def runtime_of_root(module: nn.Module) -> Runtime:
    """The runtime of the sharded model ``module``.

    Raises:
        PlanError: it is a unit inside a sharded model, or not sharded.
    """
    handle = handle_of(module)
    if handle.index:
        name = handle.runtime.plan.units[handle.index].name
        raise PlanError(f"{name} is a unit inside a sharded model; pass the whole model")
    return handle.runtime


@torch.no_grad()
def mean_over_replicas(runtime: Runtime, value: Tensor) -> Tensor:
    """The mean of ``value`` over the replicas of this step; ``value`` without replicas."""
    across = runtime.units[0].settings.across_replicas if runtime.units else None
    if across is None:
        return value
    mean = value.detach().clone()
    communicator(runtime.mesh.world, runtime.pools.device).wait(across(None, mean))
    return mean


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Leave ``torch.inference_mode`` in the block, but not ``torch.no_grad``.

    In inference mode torch can neither detach a DTensor nor make tensors that are changed later.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.name(...)`` gather the unit ``module`` like its call; ``generate``, say.

    Raises:
        PlanError: ``module`` is not a unit, or its class has no such method.
    """
    handle_of(module)
    plain = _plain_class(type(module))
    if not callable(getattr(plain, name, None)):
        raise PlanError(f"{plain.__name__} has no method {name!r}")
    methods: MethodWrappers = getattr(type(module), _METHODS)
    module.__class__ = _fsdp_class(plain, methods | {(name, _as_forward)})  # type: ignore[arg-type]


class UnshardHandle:
    """A gather in flight, from `FSDPModule.unshard`."""

    def __init__(self, unit: Handle) -> None:
        self._unit: Handle | None = unit

    def wait(self) -> None:
        """Wait for the gather, and put the whole parameters into the module.

        Further calls do nothing.
        """
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.runtime.scheduler.request(EventKind.WAIT, unit.index)


class FSDPModule(nn.Module):
    """The base class of all units and of no other modules.

    As with any collective, all ranks have to call the same methods.
    """

    # So that accelerate, and transformers' Trainer, do not wrap it.
    _is_accelerate_prepared = True

    def __new__(cls, *args: Any, **kwargs: Any) -> "FSDPModule":
        """Make a plain module: slicing an nn.Sequential instantiates its class."""
        plain: Any = _plain_class(cls)
        made: FSDPModule = plain(*args, **kwargs)
        return made

    @compiler.break_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_unit(self, super().__call__, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """Is called by ``to``, ``float`` and ``to_empty``, which make new parameters."""
        shardings = {name: sharding_of(p) for name, p in named_parameters(self)}
        attributes = {name: attributes_of(p) for name, p in named_parameters(self)}
        handle: Handle | None = self.__dict__.get(HANDLE)
        root = handle.runtime if handle is not None and handle.index == 0 else None
        if root is not None and root.scheduler.needs_preparation and root.is_converted_by(fn):
            root.scheduler.prepare_conversion()
        with _hiding_unreduced_gradients(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, sharding in shardings.items():
                if sharding is not None:
                    parameter = self.get_parameter(name)
                    sharding.attach_if_described(parameter)
                    vars(parameter).update(attributes[name])  # a swap of tensors takes them away
        if root is not None and root.is_converted():
            root.scheduler.prepare_conversion()
            root.request.apply(self)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; also in ``torch.inference_mode``, with tensors that may be trained.

        Another thread may call it while units compute: parameters are sharded in any case.
        """
        with normal_tensors():
            found = super().state_dict(*args, **kwargs)
            if not (args or kwargs.get("destination")) and HANDLE in self.__dict__:
                _replace_gathered(self, found, kwargs.get("prefix", ""))
            for name, value in found.items():
                if type(value) is AssignableDTensor and not isinstance(value, nn.Parameter):
                    found[name] = value.as_plain()
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, after waiting for the cleanup of a backward that raised."""
        handle: Handle | None = self.__dict__.get(HANDLE)
        if handle is None:
            super().zero_grad(set_to_none)
            return
        scheduler = handle.runtime.scheduler
        scheduler.await_abandoned()
        super().zero_grad(set_to_none)
        if scheduler.in_gathered:  # the modules hold other parameters
            names = {id(module) for module in self.modules()}
            for parameter in (one for unit in scheduler.units for one in unit.parameters):
                if any(id(module) in names for module in parameter.modules):
                    _drop_gradient(parameter.sharded, set_to_none=set_to_none)

    def _get_name(self) -> str:
        """The name of the user's class, for ``print(model)``."""
        return _plain_class(type(self)).__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedTensorError(
            f"{self._get_name()} is sharded, and a rank cannot write the others' shards; save with "
            "sw.save(path, model=model), or torch.save its state_dict() inside "
            "`with sw.gathered(model):`"
        )

    def __copy__(self) -> nn.Module:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A sharded copy; the copied modules must include the root of the model."""
        handle = handle_of(self)
        runtime = handle.runtime
        if handle.index == 0:
            memo[id(runtime)] = runtime
            for parameter in self.parameters():  # plain DTensors cannot be copied by `deepcopy`
                sharding = sharding_of(parameter)
                if sharding is not None:
                    sharding.copy_of(parameter, memo)
        elif id(runtime) not in memo:
            name = runtime.plan.units[handle.index].name
            raise PlanError(f"{name} is a unit inside a sharded model; copy the whole model")
        plain = _plain_class(type(self))
        twin: nn.Module = plain.__new__(plain)
        memo[id(self)] = twin
        state = {key: value for key, value in self.__dict__.items() if key != HANDLE}
        twin.__dict__.update(copy.deepcopy(state, memo))
        if handle.index == 0:
            _shard_by(runtime.plan, twin, self, runtime)
        return twin

    # -- parameters ------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters, not those of units inside it.

        They are whole until `reshard`, or until the unit's next forward or backward frees them. An
        optimizer's step in between does not change them.

        Args:
            async_op: return immediately, with a handle to wait for them.
        """
        unit = handle_of(self)
        unit.runtime.scheduler.request(EventKind.GATHER, unit.index)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters, unless its forward or backward is running."""
        unit = handle_of(self)
        unit.runtime.scheduler.request(EventKind.FREE, unit.index)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether units are freed after forward and gathered again for backward.

        Raises:
            PlanError: it is a number, which only `fully_shard` accepts.
        """
        if not isinstance(reshard_after_forward, bool):
            raise PlanError(
                f"set_reshard_after_forward({reshard_after_forward!r}): expected True or False; "
                "pass a number to fully_shard(reshard_after_forward=...)"
            )
        for settings in _settings_in(self, recurse):
            settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees units whose gradients it does not reduce.

        If not, they stay gathered for the next micro-batch, until a backward reduces. Unlike in
        FSDP2, a unit that is reduced or changed is always freed.
        """
        for settings in _settings_in(self, recurse):
            settings.reshard_after_backward = reshard_after_backward

    # -- gradients -------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients. If not, whole gradients add up on every rank.

        For accumulation with one reduction, set it to False before the first micro-batch and to
        True before the last, on every rank. As in FSDP2.

        Until then ``p.grad`` is a tensor without elements. Setting it to None, or ``zero_grad()``,
        drops what has been accumulated; reading it raises a StepError. A micro-batch that raises
        adds nothing. Hooks of `torch.Tensor.register_hook` run at a reduction, on the sum.
        """
        _check_not_reproducible(self, "set_requires_gradient_sync")
        for settings in _settings_in(self, recurse):
            settings.reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces gradients over the outer axis of a 2-D mesh.

        If not, they add up in shards of the inner axis, and ``p.grad`` is as described in
        `set_requires_gradient_sync`. As in FSDP2.
        """
        _check_not_reproducible(self, "set_requires_all_reduce")
        for settings in _settings_in(self, recurse):
            settings.all_reduce_grads = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by ``factor`` and not by the number of ranks.

        A unit with a factor may have other ranks than the module around it. Experts are one case:
        their tokens come from more ranks than the ones that have the same experts.

        Raises:
            PlanError: ``factor`` is not a positive number.
        """
        if not factor > 0:
            raise PlanError(f"set_gradient_divide_factor({factor!r}): expected a positive number")
        _check_not_reproducible(self, "set_gradient_divide_factor")
        settings_of(self).gradient_divisor = factor

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], None],
        *,
        stream: Any = None,  # noqa: ARG002 - as in FSDP2
    ) -> None:
        """Call ``hook`` with this unit's reduced gradients, before the parameters get them.

        The hook gets this rank's part of them, 1-D, and may change it in place, for example by a
        reduction over ranks that are not in the mesh. As in FSDP2.

        Args:
            hook: called on the thread and stream of backward, in the same order on every rank.
            stream: accepted, without effect.
        """
        _check_not_reproducible(self, "set_all_reduce_hook")
        settings_of(self).reduced_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the backend only sums this unit's gradients, and a separate pass divides.

        By default NCCL divides by powers of two, which gives the same bits.
        """
        settings_of(self).only_sums = enable

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether the backend allocates the gather and reduce buffers of the whole model.

        Call it on all ranks, between steps. Gradients are then reduced in their buffer and copied.

        Raises:
            PlanError: the backend cannot allocate tensors.
        """
        kind = MemoryKind.REGISTERED if enable else MemoryKind.OWN
        self._use_memory(kind)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Put the gather and reduce buffers of the whole model into symmetric memory.

        Call it on all ranks, between steps. The memory is allocated and registered in the first
        step, and again when units are called in another order. If ranks have different offsets,
        they raise a StepError. If NCCL supports it, gathers use communicators whose copies run on
        copy engines (the zero-CTA policy).

        Raises:
            PlanError: the backend has no such memory, or ``backend`` is not "NCCL".
        """
        if backend != "NCCL":
            raise PlanError(f'set_symm_mem_for_comm({backend!r}): expected "NCCL"')
        self._use_memory(MemoryKind.SYMMETRIC)

    def _use_memory(self, kind: MemoryKind) -> None:
        handle: Handle | None = self.__dict__.get(HANDLE)
        if handle is not None:
            handle.runtime.use_memory(kind)
        settings_of(self).collective_memory = kind

    # -- accepted, without effect ----------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward waits for its reductions at its end."""

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """No effect: ``prefetch`` units are gathered ahead, in the order of the last forward."""

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """No effect: ``prefetch`` units are gathered ahead, in the order of backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: units are always gathered for backward."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: whole units are reduced; see ``unused=`` of `fully_shard`."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect: at most two reduce buffers are ever alive."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: gathers and reductions always use separate groups."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """No effect: gathers wait for the stream that calls the model, and for its optimizer."""

    def reset_iter_state(self) -> None:
        """No effect: an exception leaves no state behind."""

    # -- refused ---------------------------------------------------------------------------------

    def set_custom_all_gather(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported: raises a PlanError. The mesh's process group determines the backend."""
        raise PlanError(f"set_custom_all_gather {_NO_BACKEND}")

    def set_custom_reduce_scatter(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported: raises a PlanError. The mesh's process group determines the backend."""
        raise PlanError(f"set_custom_reduce_scatter {_NO_BACKEND}")


def handle_of(module: nn.Module) -> Handle:
    handle = module.__dict__.get(HANDLE)
    if handle is None:
        name = type(module).__name__
        if isinstance(module, FSDPModule):
            raise PlanError(f"{name} is on the meta device, so not sharded yet")
        raise PlanError(f"{name} is not sharded; call sw.fully_shard on it first")
    assert isinstance(handle, Handle)
    return handle


def set_managed(root: nn.Module) -> None:
    """Mark ``root`` for other libraries if its ranks must call its modules together."""
    plans = (runtime.plan for runtime in runtimes_in(root))
    gathers = any(unit.gathered_bytes for plan in plans for unit in plan.units)
    _private.set_managed(root, is_managed=gathers)


def become_unit(module: nn.Module, handle: Handle, methods: MethodWrappers = frozenset()) -> None:
    """Make ``module`` the unit of ``handle``."""
    module.__dict__[HANDLE] = handle
    if not isinstance(module, FSDPModule):
        module.__class__ = _fsdp_class(type(module), methods)  # type: ignore[arg-type]


@cache
def _fsdp_class(plain: Any, methods: MethodWrappers) -> type[nn.Module]:
    contents: dict[str, Any] = {"__module__": plain.__module__, _METHODS: methods}
    contents |= {name: wrap(getattr(plain, name)) for name, wrap in methods}
    return type(f"FSDP{plain.__name__}", (FSDPModule, plain), contents)


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call_unit(self, partial(method, self), args, kwargs)

    return compiler.break_graph(call)


@compiler.break_graph
def _call_unit(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    paused = compiler.pause()
    try:
        handle = handle_of(module)
        if handle.index == 0 and make_room_for_unfrozen(module):
            handle = handle_of(module)
        if paused is not None:
            forward = partial(compiler.run_resumed, paused, forward)
        return handle.runtime.call(handle, module, forward, args, kwargs)
    finally:
        compiler.resume(paused)


def _plain_class(sharded: type[nn.Module]) -> type[nn.Module]:
    return cast("type[nn.Module]", sharded.__bases__[1])


def _replace_gathered(module: nn.Module, found: dict[str, Any], prefix: str) -> None:
    """Replace parameters that are gathered at the moment, for a unit that computes, by shards."""
    scheduler = handle_of(module).runtime.scheduler
    parameters = [p for unit in scheduler.units for p in unit.parameters]
    if scheduler.in_gathered:
        return
    by_id = {id(one): p for p in parameters for one in (p.dense, p.sharded)}
    for name, shown in module.named_parameters(remove_duplicate=False):
        parameter, value = by_id.get(id(shown)), cast("Tensor | None", found.get(prefix + name))
        if parameter is None or value is None or isinstance(value, DTensor):
            continue
        if value.untyped_storage() is parameter.dense.untyped_storage():
            found[prefix + name] = parameter.sharded.detach()


def make_room_for_unfrozen(root: nn.Module) -> bool:
    """If parameters were frozen and no longer are, shard again with room for their gradients."""
    runtime = handle_of(root).runtime
    names = runtime.unfrozen()
    if not names:
        return False
    # The new parameters would otherwise be inference tensors, which cannot be trained.
    with _private.without_transforms(), torch.inference_mode(mode=False):
        runtime.scheduler.prepare_conversion()
        with keeping_gradients(root):
            _shard_by(runtime.plan.unfrozen(names), root, root, runtime)
    return True


def _shard_by(plan: Plan, module: nn.Module, root: nn.Module, runtime: Runtime) -> None:
    """Shard ``module``, which is ``root`` or a copy of it, like ``root`` but with ``plan``."""
    new = runtime.request.build(module, plan, runtime)
    for index, unit in enumerate(plan.units):
        original = root.get_submodule(unit.name)
        handle = Handle(new, index, handle_of(original).options)
        become_unit(module.get_submodule(unit.name), handle, getattr(type(original), _METHODS))
    new.watch_structure(module, warns=runtime.warns_of_added)


@contextlib.contextmanager
def keeping_gradients(root: nn.Module) -> Iterator[None]:
    """Keep the gradients of ``root`` while it is sharded again."""
    gradients = {name: p.grad for name, p in root.named_parameters() if sharding_of(p) is not None}
    yield
    for name, gradient in gradients.items():
        parameter = root.get_parameter(name)
        sharding = sharding_of(parameter)
        if sharding is None or not isinstance(gradient, DTensor):
            continue
        if sharding.describes(gradient):
            local = sharding.copy_of_local(gradient)
        else:
            local = sharding.own_part_of(gradient.full_tensor()).reshape(-1).contiguous()
        parameter.grad = sharding.wrap_gradient(local.to(dtype_of_gradient(parameter)))


@contextlib.contextmanager
def _hiding_unreduced_gradients(module: nn.Module) -> Iterator[None]:
    """Take gradients without elements from the parameters, which `Module._apply` would read."""
    hidden = {n: p.grad for n, p in named_parameters(module) if is_unreduced(p.grad)}
    for name in hidden:
        module.get_parameter(name).grad = None
    yield
    for name, gradient in hidden.items():
        parameter = module.get_parameter(name)
        if dtype_of_gradient(parameter) == gradient.dtype:  # else the next forward refuses it
            parameter.grad = gradient


def _drop_gradient(parameter: nn.Parameter, *, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.zero_()


def _check_not_reproducible(module: nn.Module, method: str) -> None:
    handle: Handle | None = vars(module).get(HANDLE)
    if handle is not None and handle.runtime.mesh.leaves is not None:
        raise PlanError(
            f"{method}: the model is reproducible, so the engine sums the gradients of all "
            f"{handle.runtime.mesh.leaves} micro-batches of a step, and divides by their number; "
            "leave out the call, or reproducible=... of fully_shard"
        )


def _units_in(module: nn.Module, recurse: bool) -> "list[FSDPModule]":
    modules = module.modules() if recurse else (module,)
    return [unit for unit in modules if isinstance(unit, FSDPModule)]


def _settings_in(module: nn.Module, recurse: bool) -> list[UnitSettings]:
    return [settings_of(unit) for unit in _units_in(module, recurse)]


def runtimes_in(module: nn.Module) -> list[Runtime]:
    """The runtimes of the units in ``module``; several if it contains separate models."""
    handle_of(module)
    return list(dict.fromkeys(handle_of(unit).runtime for unit in _units_in(module, recurse=True)))
