"""The classes of sharded modules: their calls, conversions, copies and state dicts."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import islice
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _private
from shardwise.comm.communicator import communicator
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.plan.plan import Plan
from shardwise.plan.units import named_parameters
from shardwise.runtime.accumulation import dtype_of_gradient, is_unreduced
from shardwise.runtime.attach import parameter_of
from shardwise.runtime.engine import HANDLE, Handle, Runtime
from shardwise.runtime.hooks import break_graph
from shardwise.runtime.ledger import Ledger
from shardwise.runtime.parameters import attributes_of
from shardwise.tensor.sharding import AssignableDTensor, sharding_of

__all__ = [
    "MethodWrappers",
    "UnitMethods",
    "as_forward",
    "become_unit",
    "handle_of",
    "is_unit",
    "keeping_gradients",
    "ledger",
    "lenders_of",
    "mean_over_replicas",
    "normal_tensors",
    "plain_class",
    "register_forward_method",
    "runtime_of_root",
    "runtimes_in",
    "set_managed",
    "shard_again_if_outdated",
    "unit_class",
    "units_in",
]

# (name of a method of a unit's class, function that wraps the method)
MethodWrappers = frozenset[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]]

K = TypeVar("K", bound=type[nn.Module])

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
        PlanError: ``module`` is not a unit, or has no such method.
    """
    handle_of(module)
    kind, plain = type(module).__bases__
    own = vars(module).get(name)  # hides the method of the class
    if callable(own):
        is_bound = isinstance(own, MethodType) and own.__self__ is module
        method = own.__func__ if is_bound else lambda _module, *args, **kwargs: own(*args, **kwargs)
        vars(module)[name] = MethodType(as_forward(method), module)
        return
    if not callable(getattr(plain, name, None)):
        raise PlanError(f"{plain.__name__} has no method {name!r}")
    methods: MethodWrappers = getattr(type(module), _METHODS)
    if all(name != wrapped for wrapped, _ in methods):
        module.__class__ = _unit_class(kind, plain, methods | {(name, as_forward)})


def as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``method`` of a unit so that it gathers the unit like its call."""

    @wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call_unit(self, partial(method, self), args, kwargs)

    return break_graph(call)


@break_graph
def _pause() -> Any:
    """Stop compilation in this thread. Returns the argument of `_resume`."""
    return _private.eval_frame.set_eval_frame(None)


@break_graph
def _resume(compiler: Any) -> None:
    _private.eval_frame.set_eval_frame(compiler)


@break_graph
def _run_resumed(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the paused ``compiler`` resumed."""
    _private.eval_frame.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        _private.eval_frame.set_eval_frame(None)


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``method`` so that torch.compile compiles nothing that it calls."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        paused = _pause()
        try:
            return method(*args, **kwargs)
        finally:
            _resume(paused)

    return break_graph(call)


class UnitMethods(nn.Module):
    """What a unit does differently from the user's module; see `unit_class`."""

    # So that accelerate, and transformers' Trainer, do not wrap it.
    _is_accelerate_prepared = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Become a plain module: slicing an nn.Sequential instantiates its class."""
        plain = plain_class(type(self))
        object.__setattr__(self, "__class__", plain)
        plain.__init__(self, *args, **kwargs)

    @break_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_unit(self, _plain(self).__call__, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "UnitMethods":
        """Is called by ``to``, ``float`` and ``to_empty``, which make new parameters."""
        shardings = {name: sharding_of(p) for name, p in named_parameters(self)}
        attributes = {name: attributes_of(p) for name, p in named_parameters(self)}
        handle: Handle | None = self.__dict__.get(HANDLE)
        root = handle.runtime if handle is not None and handle.index == 0 else None
        converted = set() if root is None else root.masters_converted_by(fn)
        if (
            root is not None
            and root.scheduler.needs_preparation
            and (converted or root.is_converted_by(fn))
        ):
            root.scheduler.prepare_conversion()
        with _hiding_unreduced_gradients(self):
            _plain(self)._apply(fn, recurse)
            for name, sharding in shardings.items():
                if sharding is not None:
                    parameter = parameter_of(self, name)
                    sharding.attach_if_described(parameter)
                    vars(parameter).update(attributes[name])  # a swap of tensors takes them away
        if root is not None and (converted or root.is_converted()):
            root.scheduler.prepare_conversion()
            root.request.apply(self, converted)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; also in ``torch.inference_mode``, with tensors that may be trained.

        Another thread may call it while units compute: parameters are sharded in any case.
        """
        is_nested = bool(kwargs.get("prefix")) and kwargs.get("destination") is not None
        num_others = len(kwargs["destination"]) if is_nested else 0
        with normal_tensors():
            found = _plain(self).state_dict(*args, **kwargs)
            if not (args or kwargs.get("destination")) and HANDLE in self.__dict__:
                _replace_gathered(self, found, kwargs.get("prefix", ""))
            for name, value in [*islice(found.items(), num_others, None)]:
                if type(value) is AssignableDTensor and not isinstance(value, nn.Parameter):
                    found[name] = value.as_plain(keeps_local=True)
        return found

    @_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, after waiting for the cleanup of a backward that raised."""
        handle: Handle | None = self.__dict__.get(HANDLE)
        if handle is None:
            _plain(self).zero_grad(set_to_none)
            return
        scheduler = handle.runtime.scheduler
        scheduler.await_abandoned()
        _plain(self).zero_grad(set_to_none)
        if scheduler.in_gathered:  # the modules hold other parameters
            names = {id(module) for module in self.modules()}
            for parameter in scheduler.parameters:
                if any(id(module) in names for module in parameter.modules):
                    gradient = parameter.sharded.grad
                    if set_to_none:
                        parameter.sharded.grad = None
                    elif gradient is not None:
                        gradient.zero_()

    def _shard_now(self) -> None:
        """Shard the module, if `fully_shard` has deferred that."""
        raise PlanError(f"{self._get_name()} is not sharded; call sw.fully_shard on it first")

    def _get_name(self) -> str:
        """The name of the user's class, for ``print(model)``."""
        return plain_class(type(self)).__name__

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
        plain = plain_class(type(self))
        twin: nn.Module = plain.__new__(plain)
        memo[id(self)] = twin
        state = {key: value for key, value in self.__dict__.items() if key != HANDLE}
        twin.__dict__.update(copy.deepcopy(state, memo))
        if handle.index == 0:
            _shard_by(runtime.plan, twin, self, runtime, memo)
        return twin


_UNIT = "_is_shardwise_unit"  # an attribute of the classes of `unit_class`


def unit_class(kind: K) -> K:
    """Make ``kind`` the class between those of units and the user's: add the methods of units.

    They are copied and not inherited. With one more base class, programs would not find the user's
    class in ``type(unit).__mro__``, after the class of the unit and FSDP2's `FSDPModule`.
    """
    for name, value in vars(UnitMethods).items():
        if name not in ("__module__", "__doc__") and name not in vars(kind):
            setattr(kind, name, value)
    setattr(kind, _UNIT, True)
    return kind


def is_unit(module: object) -> bool:
    return hasattr(type(module), _UNIT)


def _plain(unit: nn.Module) -> Any:
    """The ``unit`` with the methods of the user's class."""
    return super(next(c for c in type(unit).__mro__ if _UNIT in vars(c)), unit)


def handle_of(module: nn.Module) -> Handle:
    handle = module.__dict__.get(HANDLE)
    if handle is None:
        name = type(module).__name__
        if is_unit(module):
            cast("Any", module)._shard_now()
            return handle_of(module)
        for inner, child in module.named_children():
            if HANDLE in vars(child):
                raise PlanError(f"{name} is not sharded, but its {inner!r} is; pass that module")
        raise PlanError(f"{name} is not sharded; call sw.fully_shard on it first")
    assert isinstance(handle, Handle)
    return handle


def set_managed(root: nn.Module) -> None:
    """Mark ``root`` for other libraries if its ranks must call its modules together."""
    plans = (runtime.plan for runtime in runtimes_in(root))
    gathers = any(unit.gathered_bytes for plan in plans for unit in plan.units)
    _private.set_managed(root, is_managed=gathers)


def become_unit(
    module: nn.Module, handle: Handle, kind: type[nn.Module], methods: MethodWrappers
) -> None:
    """Make ``module`` the unit of ``handle``, a ``kind`` whose ``methods`` are wrapped."""
    module.__dict__[HANDLE] = handle
    if not is_unit(module):
        module.__class__ = _unit_class(kind, type(module), methods)  # type: ignore[arg-type]


@cache
def _unit_class(kind: type[nn.Module], plain: Any, methods: MethodWrappers) -> type[nn.Module]:
    contents: dict[str, Any] = {"__module__": plain.__module__, _METHODS: methods}
    contents |= {name: wrap(getattr(plain, name)) for name, wrap in methods}
    return type(f"FSDP{plain.__name__}", (kind, plain), contents)


@break_graph
def _call_unit(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    paused = _pause()
    try:
        handle = handle_of(module)
        if handle.index == 0 and handle.runtime.is_outdated():
            shard_again_if_outdated(module)
            handle = handle_of(module)
        if paused is not None:
            forward = partial(_run_resumed, paused, forward)
        depth = handle.runtime.scheduler.depth
        forward = _within_lenders(handle, module, forward)
        try:
            return handle.runtime.call(handle, module, forward, args, kwargs)
        except BaseException as error:
            handle.runtime.unwind(depth, error)
            raise
    finally:
        _resume(paused)


def lenders_of(plan: Plan, modules: Sequence[nn.Module]) -> dict[int, weakref.ref[nn.Module]]:
    """The `Handle.lender` of units that have one, by index; ``modules`` are those of all units."""
    return {index: weakref.ref(modules[holder]) for index, holder in plan.lenders().items()}


def _within_lenders(
    handle: Handle, module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The ``forward`` of a unit inside calls of its lenders, unless these compute already.

    For example of a head whose weight is that of the embedding, for chunks of a loss. The
    lenders' conversions of inputs and outputs do not apply.
    """
    while handle.lender is not None and (lender := handle.lender()) is not None:
        handle = handle_of(lender)
        if not handle.runtime.scheduler.sequencer.is_in_use(handle.index):
            options = handle.options
            precision = replace(options.precision, cast_forward_inputs=False, output_dtype=None)
            handle = replace(handle, options=replace(options, precision=precision))
            forward = partial(_lend, handle, module, forward)
    return forward


def _lend(
    handle: Handle, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return handle.runtime.call(handle, module, forward, args, kwargs)


def plain_class(sharded: type[nn.Module]) -> type[nn.Module]:
    """The user's class, of which the class of a unit is a subclass."""
    return cast("type[nn.Module]", sharded.__bases__[1])


def _replace_gathered(module: nn.Module, found: dict[str, Any], prefix: str) -> None:
    """Replace parameters that are gathered at the moment, for a unit that computes, by shards.

    Inside `gathered`, copy those of classes with all-gather extensions: their memory is reused.
    """
    scheduler = handle_of(module).runtime.scheduler
    by_id = {id(one): p for p in scheduler.parameters for one in (p.dense, p.sharded)}
    for name, shown in module.named_parameters(remove_duplicate=False):
        parameter, value = by_id.get(id(shown)), cast("Tensor | None", found.get(prefix + name))
        if parameter is None or value is None:
            continue
        if scheduler.in_gathered:
            found[prefix + name] = value.clone()
        elif isinstance(value, DTensor):
            continue
        elif value.untyped_storage() is parameter.dense.untyped_storage():
            found[prefix + name] = parameter.sharded.detach()


def shard_again_if_outdated(root: nn.Module) -> None:
    """If modules inside were converted or tied, or parameters are no longer frozen, shard again.

    A conversion of ``root`` itself shards at once; see `UnitMethods._apply`.
    """
    runtime = handle_of(root).runtime
    names, is_converted = runtime.unfrozen(), runtime.is_converted()
    is_changed = is_converted or runtime.is_tied_since()
    if not names and not is_changed:
        return
    # The new parameters would otherwise be inference tensors, which cannot be trained.
    with _private.without_transforms(), torch.inference_mode(mode=False):
        runtime.scheduler.prepare_conversion()
        if is_changed:
            for one in runtime.scheduler.parameters:
                for owner in one.owners:
                    if (held := owner.get()) is not None:
                        one.sharding.attach_if_described(held)  # a conversion takes it away
            runtime.request.apply(root)
        else:
            with keeping_gradients(root):
                _shard_by(runtime.plan.unfrozen(names), root, root, runtime, {})


def _shard_by(
    plan: Plan, module: nn.Module, root: nn.Module, runtime: Runtime, memo: Mapping[int, Any]
) -> None:
    """Shard ``module`` like ``root`` but with ``plan``.

    It is ``root``, or a copy of it with copied units in the ``memo`` of `copy.deepcopy`.
    """
    originals = [_unit_now(root, unit.name) for unit in plan.units]
    modules = [memo.get(id(original), original) for original in originals]
    names = {id(one): name for name, one in module.named_modules()}
    units = zip(plan.units, modules, strict=True)
    plan = replace(plan, units=tuple(replace(unit, name=names[id(one)]) for unit, one in units))
    new, lenders = runtime.request.build(module, plan, runtime), lenders_of(plan, modules)
    for index, (original, one) in enumerate(zip(originals, modules, strict=True)):
        handle = Handle(new, index, handle_of(original).options, lenders.get(index))
        kind = cast("type[nn.Module]", type(original).__bases__[0])
        methods: MethodWrappers = getattr(type(original), _METHODS)
        become_unit(one, handle, kind, methods)
    new.watch_structure(module, warns=runtime.warns_of_added)


def _unit_now(root: nn.Module, name: str) -> nn.Module:
    """The unit ``name`` of the plan, around which there may be a wrapper now.

    Raises:
        PlanError: it is no longer in the model.
    """
    try:
        return next(one for one in root.get_submodule(name).modules() if HANDLE in vars(one))
    except (AttributeError, StopIteration):
        raise PlanError(
            f"{name} was removed after fully_shard, so the model can neither be copied nor trained "
            "with parameters that were frozen; remove it before fully_shard"
        ) from None


@contextlib.contextmanager
def keeping_gradients(root: nn.Module) -> Iterator[None]:
    """Keep the gradients of ``root`` while it is sharded again."""
    gradients = {name: p.grad for name, p in named_parameters(root) if sharding_of(p) is not None}
    yield
    for name, gradient in gradients.items():
        parameter = parameter_of(root, name)
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
        parameter_of(module, name).grad = None
    yield
    for name, gradient in hidden.items():
        parameter = parameter_of(module, name)
        if dtype_of_gradient(parameter) == gradient.dtype:  # else the next forward refuses it
            parameter.grad = gradient


def units_in(module: nn.Module, recurse: bool) -> list[Any]:
    """The units in ``module``; only ``module`` itself unless ``recurse``."""
    modules = module.modules() if recurse else (module,)
    return [unit for unit in modules if is_unit(unit)]


def runtimes_in(module: nn.Module) -> list[Runtime]:
    """The runtimes of the units in ``module``; several if it contains separate models."""
    handle_of(module)
    return list(dict.fromkeys(handle_of(unit).runtime for unit in units_in(module, recurse=True)))
