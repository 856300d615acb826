"""Initial values that do not depend on the number of ranks, for models with storage and without.

Torch's generators are seeded anew for every module, from the seed and the module's name. So it does
not matter which modules were initialised before, and a model on the meta device can be built one
unit at a time, in which case no more than a unit of it is ever whole.

Modules are taken in the reverse of their order in ``named_modules()``: those inside a module before
it, as when it was constructed, so that what it does to their parameters holds.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._private import OpOverload, TorchDispatchMode
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.runtime.attach import owner_of, replace_parameter
from shardwise.runtime.checks import check_initialized, checksum
from shardwise.runtime.memory import Pool
from shardwise.tensor.operations import draws, written_tensors
from shardwise.tensor.sharding import sharding_of
from shardwise.transport.device import random_states, seed_generators, set_random_states

__all__ = ["Initialization", "Materializer", "initialize"]

_METHODS = ("reset_parameters", "_reset_parameters")
_WAY_OUT = (
    "pass init_fn, a function that is called with each module that holds parameters or buffers, "
    "and fills those"
)


@dataclass(frozen=True)
class Initialization:
    """How a model gets its first values.

    Attributes:
        seed: of the whole model; every module has its own, made from it and the module's name.
        init_fn: as in `initialize`.
    """

    seed: int = 0
    init_fn: Callable[[nn.Module], None] | None = None

    def run(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Initialise one module, named ``name`` in its model."""
        fill = self._filler(module)
        if fill is None:
            return
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        seed_generators(device, int.from_bytes(digest[:8]) >> 1)
        try:
            fill()
        except (ShardedTensorError, NotImplementedError) as error:
            raise PlanError(
                f"{name or 'the root'}: initialising a {type(module).__name__} reaches into "
                f"another unit, which is not whole at the same time ({error}); {_WAY_OUT}"
            ) from error

    def _filler(self, module: nn.Module) -> Callable[[], None] | None:
        if self.init_fn is not None:
            has_own = module._parameters or module._buffers
            return partial(self.init_fn, module) if has_own else None
        found = (getattr(module, method, None) for method in _METHODS)
        return next((one for one in found if callable(one)), None)


@torch.no_grad()
def initialize(
    model: nn.Module, seed: int = 0, *, init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Give ``model`` initial values that depend on nothing but ``seed`` and names.

    They are the bits that `fully_shard` gives the same model on the meta device, on any number of
    ranks, with ``init=sw.Initialization(seed, init_fn)``. Before each module torch's generator is
    seeded from ``seed`` and the module's name; afterwards it is as it was. A parameter that several
    modules share gets what the first of them in ``named_modules()`` gives it.

    Args:
        model: plain, not yet sharded, on the CPU or on one GPU (which draws other numbers).
        seed: of the whole model.
        init_fn: called with each module that holds parameters or buffers itself, to fill these;
            None calls ``reset_parameters()`` or ``_reset_parameters()`` of all that have it.

    Raises:
        PlanError: the model is sharded already or on the meta device, or a parameter was left as it
            was. Buffers that nothing fills keep their values.
    """
    check_initialized(model)
    parameters = dict(model.named_parameters())
    _check_plain(parameters)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    initialization = Initialization(seed, init_fn)
    with _generators_kept(device), _Writes() as writes:
        for name, module in _in_order(model):
            initialization.run(name, module, device)
    left = [
        name
        for name, parameter in model.named_parameters()
        if parameter is parameters.get(name) and not writes.reached(parameter)
    ]
    if left:
        raise _unfilled(model, left)


class Materializer:
    """Gives the units of a model on the meta device storage and values, one at a time."""

    def __init__(
        self, root: nn.Module, plan: Plan, initialization: Initialization, pool: Pool
    ) -> None:
        self._root = root
        self._initialization = initialization
        self._device = pool.device
        # Without it, the shards that are allocated between two units would cut up the heap, and
        # each unit would take memory of its own (measured: the whole model's, instead of a unit's).
        self._pool = pool
        self._lent: list[torch.UntypedStorage] = []
        self._modules = _in_order(root)
        units = {unit.name for unit in plan.units}
        self._unit_of = {name: _innermost(name, units) for name, _ in self._modules}
        self.checksums: dict[str, Tensor] = {}  # of whole parameters, to compare between ranks

    @torch.no_grad()
    def fill(self, unit: UnitPlan) -> None:
        """Make the parameters of ``unit`` and the buffers of its modules whole, with values.

        Units inside it come first; those that were filled before have been cut by now.
        """
        self.take_back()
        parameters = {spec.name: self._allocate_parameter(spec.names) for spec in unit.parameters}
        buffers = self._allocate_buffers(unit)
        own = {id(parameter) for parameter in parameters.values()}
        with _generators_kept(self._device), _Writes() as writes:
            for name, module in self._modules:
                if self._unit_of[name] == unit.name or _holds(module, own):
                    with self._scratch(module, own):
                        self._initialization.run(name, module, self._device)
        left = [
            name
            for name, empty in (parameters | buffers).items()
            if not _is_filled(_at(self._root, name), empty, writes)
        ]
        if left:
            raise _unfilled(self._root, left)
        for name in parameters:
            self.checksums[name] = checksum(_at(self._root, name))

    def take_back(self) -> None:
        """The parameters of the last unit are cut: nothing needs their memory any more."""
        for storage in self._lent:
            self._pool.free(storage)
        self._lent = []

    def _allocate_parameter(self, names: Sequence[str]) -> Tensor:
        owners = [owner_of(self._root, name) for name in names]
        original = self._root.get_parameter(names[0])
        storage = self._pool.allocate(original.nbytes)
        self._lent.append(storage)
        whole = torch.empty(0, dtype=original.dtype, device=self._device)
        whole.set_(storage, 0, original.shape, original.stride())
        parameter = replace_parameter(original, _without_value(whole))
        for owner in owners:
            owner.put(parameter)
        return parameter

    def _allocate_buffers(self, unit: UnitPlan) -> dict[str, Tensor]:
        allocated = {}
        for path, module in self._modules:
            if self._unit_of[path] != unit.name:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    empty = _without_value(torch.empty_like(buffer, device=self._device))
                    module._buffers[name] = empty
                    allocated[f"{path}.{name}" if path else name] = empty
        return allocated

    @contextlib.contextmanager
    def _scratch(self, module: nn.Module, own: set[int]) -> Iterator[None]:
        """Let ``module`` fill parameters that are not of this unit, into memory that is dropped."""
        held = module._parameters.items()
        foreign = {name: p for name, p in held if p is not None and id(p) not in own}
        for name, p in foreign.items():
            plain = torch.empty(p.shape, dtype=p.dtype, device=self._device)
            module._parameters[name] = nn.Parameter(plain, requires_grad=False)
        try:
            yield
        finally:
            module._parameters.update(foreign)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which memory is written to, by the address where it begins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses: set[int] = set()

    def reached(self, tensor: Tensor) -> bool:
        """Whether something was written into the memory of ``tensor``."""
        address = tensor.untyped_storage().data_ptr()
        return not tensor.numel() or address in self._addresses

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs) if func._schema.is_mutable else ():
            if tensor.is_meta:
                raise NotImplementedError(f"{func} into a tensor on the meta device")
            if isinstance(tensor, DTensor):
                self._check_draws_nothing(func, tensor)
            else:
                self._addresses.add(tensor.untyped_storage().data_ptr())
        return func(*args, **kwargs)

    def _check_draws_nothing(self, func: OpOverload, tensor: DTensor) -> None:
        """A unit's values follow from the names of its own modules."""
        if draws(func):
            sharding = sharding_of(tensor)
            name = "a parameter" if sharding is None else sharding.name
            raise ShardedTensorError(f"{func} into {name}, which is cut already")


def _check_plain(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if sharding_of(parameter) is not None:
            raise PlanError(f"{name} is sharded already; initialise the model before fully_shard")
        if parameter.is_meta:
            raise PlanError(
                f"{name} is on the meta device; it gets storage and values in "
                "sw.fully_shard(model, init=sw.Initialization(seed))"
            )


def _in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())[::-1]


def _innermost(name: str, units: set[str]) -> str:
    """The unit that the module ``name`` belongs to."""
    while name not in units:
        name = name.rpartition(".")[0]
    return name


def _holds(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module._parameters.values())


def _without_value(tensor: Tensor) -> Tensor:
    """Filled with what shows where nothing is written later, if the dtype has such a value."""
    return tensor.fill_(math.nan if _has_nan(tensor.dtype) else 0)


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _is_filled(current: Tensor | None, empty: Tensor, writes: _Writes) -> bool:
    if current is None or current is not empty:  # the module put another tensor in its place
        return current is None or not current.is_meta
    if _has_nan(current.dtype) and current.numel():
        real = torch.view_as_real(current) if current.is_complex() else current
        return not bool(real.amax().isnan())  # `isnan` of all would take a quarter of its memory
    return writes.reached(current)


def _at(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(path), attribute)


def _unfilled(root: nn.Module, names: Sequence[str]) -> PlanError:
    owner = type(root.get_submodule(names[0].rpartition(".")[0])).__name__
    return PlanError(
        f"{', '.join(names)}: nothing gives all of it a value, for {owner} has no "
        f"reset_parameters() that does; {_WAY_OUT}"
    )


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(device, states)
