"""Initial values that do not depend on the number of ranks, on a real device or the meta device.

Torch's generators are seeded again for every module, from the seed and the module's name. The
values of a module therefore do not depend on which modules were initialized before it. A model on
the meta device can be built one unit at a time, so that at most one unit is whole at any moment.

Modules are visited in the reverse order of ``named_modules()``: children before their parent, as in
construction, so that what the parent does to their parameters takes effect.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise._private import OpOverload, TorchDispatchMode
from shardwise.comm.device import keeping_random_states, seed_generators
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.features.checks import check_initialized, checksum
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.runtime.attach import owner_of, parameter_of, replace_parameter
from shardwise.runtime.memory import Pool
from shardwise.tensor.operations import draws, written_tensors
from shardwise.tensor.sharding import is_tensor_parallel, sharding_of

__all__ = ["Initialization", "Materializer", "initialize", "innermost_unit"]

_METHODS = ("reset_parameters", "_reset_parameters")
_WAY_OUT = (
    "pass init_fn, a function that is called with each module that holds parameters or buffers "
    "and fills them"
)


@dataclass(frozen=True)
class Initialization:
    """How a model gets its initial values.

    Attributes:
        seed: seed of the whole model, from which each module's own seed follows by its name.
        init_fn: as in `initialize`.
    """

    seed: int = 0
    init_fn: Callable[[nn.Module], None] | None = None

    def run(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Initialize ``module``, which is named ``name`` in its model."""
        fill = self._filler(module)
        if fill is None:
            return
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        seed_generators(device, int.from_bytes(digest[:8]) >> 1)
        try:
            fill()
        except (ShardedTensorError, NotImplementedError) as error:
            raise PlanError(
                f"{name or 'the root'}: initializing a {type(module).__name__} accesses another "
                f"unit, which is not whole at the same time ({error}); {_WAY_OUT}"
            ) from error

    def _filler(self, module: nn.Module) -> Callable[[], None] | None:
        if self.init_fn is not None:
            has_own = module._parameters or module._buffers
            return partial(self.init_fn, module) if has_own else None
        methods = (getattr(module, name, None) for name in _METHODS)
        return next((method for method in methods if callable(method)), None)


@torch.no_grad()
def initialize(
    model: nn.Module, seed: int = 0, *, init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Give ``model`` initial values that depend only on ``seed`` and the names of its modules.

    They are the same bits that `fully_shard` with ``init=sw.Initialization(seed, init_fn)`` gives
    the same model on the meta device, on any number of ranks. Torch's generator is seeded from
    ``seed`` and the module's name before each module, and restored afterwards. A parameter that
    several modules share gets the value from the first of them in ``named_modules()``.

    Args:
        model: not sharded yet, on the CPU or on one GPU (a GPU draws different numbers).
        seed: seed of the whole model.
        init_fn: called with each module that itself holds parameters or buffers, to fill them.
            None calls ``reset_parameters()`` or ``_reset_parameters()`` of each module that has it.

    Raises:
        PlanError: the model is already sharded or on the meta device, or a parameter was not
            filled. Buffers that nothing fills keep their values.
    """
    check_initialized(model)
    parameters = dict(model.named_parameters())
    _check_plain(parameters)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    initialization = Initialization(seed, init_fn)
    with keeping_random_states(device), _Writes() as writes:
        for name, module in _in_order(model):
            initialization.run(name, module, device)
    left = [
        name
        for name, parameter in model.named_parameters()
        if parameter is parameters.get(name) and not writes.reached(parameter)
    ]
    if left:
        raise _unfilled_error(model, left)


class Materializer:
    """Gives storage and values to the units of a model on the meta device, one at a time."""

    def __init__(
        self, root: nn.Module, plan: Plan, initialization: Initialization, pool: Pool
    ) -> None:
        self._root = root
        self._initialization = initialization
        self._device = pool.device
        # Without a pool, the shards that are allocated between two units would fragment the heap,
        # and each unit would take new memory (measured: that of the whole model, not of one unit).
        self._pool = pool
        self._allocated: list[torch.UntypedStorage] = []  # for the last unit
        self._modules = _in_order(root)
        self._places = {id(module): place for place, (_, module) in enumerate(self._modules)}
        self._of_unit: dict[str, list[int]] = {unit.name: [] for unit in plan.units}  # places
        for place, (path, _) in enumerate(self._modules):
            self._of_unit[innermost_unit(path, self._of_unit)].append(place)
        self.checksums: dict[str, Tensor] = {}  # of whole parameters, to compare between ranks

    @torch.no_grad()
    def fill(self, unit: UnitPlan) -> None:
        """Allocate and initialize the parameters of ``unit`` and the buffers of its modules.

        Units inside ``unit`` are filled before it. Units filled earlier are already cut into
        shards.
        """
        self.free_last_unit()
        originals = {spec.name: parameter_of(self._root, spec.name) for spec in unit.parameters}
        parameters = {spec.name: self._allocate_parameter(spec.names) for spec in unit.parameters}
        buffers = self._allocate_buffers(unit)
        own = {id(parameter) for parameter in parameters.values()}
        with keeping_random_states(self._device), _Writes() as writes:
            for name, module in self._modules_with_parameters_of(unit):
                with self._scratch(module, own):
                    self._initialization.run(name, module, self._device)
        left = [
            name
            for name, empty in (parameters | buffers).items()
            if not _is_filled(attrgetter(name)(self._root), empty, writes)
        ]
        if left:
            raise _unfilled_error(self._root, left)
        for spec in unit.parameters:
            self.checksums[spec.name] = checksum(parameter_of(self._root, spec.name))
            if is_tensor_parallel(original := originals[spec.name]):
                self._divide(spec.names, original)

    def free_last_unit(self) -> None:
        """Free the memory of the last unit, whose parameters are now cut into shards."""
        for storage in self._allocated:
            self._pool.free(storage)
        self._allocated = []

    def _modules_with_parameters_of(self, unit: UnitPlan) -> list[tuple[str, nn.Module]]:
        """The modules of ``unit``, and others that share parameters with them, in order."""
        names = (name for spec in unit.parameters for name in spec.names)
        owners = (self._root.get_submodule(name.rpartition(".")[0]) for name in names)
        places = {*self._of_unit[unit.name], *(self._places[id(owner)] for owner in owners)}
        return [self._modules[place] for place in sorted(places)]

    def _allocate_parameter(self, names: Sequence[str]) -> Tensor:
        original = parameter_of(self._root, names[0])
        num_bytes = original.numel() * original.itemsize  # of all parts in tensor parallelism
        storage = self._pool.allocate(num_bytes)
        self._allocated.append(storage)
        whole = torch.empty(0, dtype=original.dtype, device=self._device)
        whole.set_(storage, 0, original.shape, original.stride())
        return self._replace(names, original, _without_value(whole))

    def _divide(self, names: Sequence[str], original: nn.Parameter) -> None:
        """Replace a whole parameter by this rank's part, as tensor parallelism divides it."""
        assert isinstance(original, DTensor)
        whole = parameter_of(self._root, names[0])
        spec = original.device_mesh, original.placements
        part = distribute_tensor(whole.detach(), *spec, src_data_rank=None)  # sends nothing
        self._replace(names, whole, part)

    def _replace(self, names: Sequence[str], original: nn.Parameter, payload: Tensor) -> Tensor:
        """Put ``payload`` in place of ``original`` under all of its names."""
        owners = [owner_of(self._root, name) for name in names]
        parameter = replace_parameter(original, payload)
        for owner in owners:
            owner.put(parameter)
        return parameter

    def _allocate_buffers(self, unit: UnitPlan) -> dict[str, Tensor]:
        allocated = {}
        for place in self._of_unit[unit.name]:
            path, module = self._modules[place]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    empty = _without_value(torch.empty_like(buffer, device=self._device))
                    module._buffers[name] = empty
                    allocated[f"{path}.{name}" if path else name] = empty
        return allocated

    @contextlib.contextmanager
    def _scratch(self, module: nn.Module, own: set[int]) -> Iterator[None]:
        """Give ``module`` temporary memory for its parameters that belong to other units."""
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
    """Records which storages are written to, by their start addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses: set[int] = set()

    def reached(self, tensor: Tensor) -> bool:
        """Whether an operation has written to the storage of ``tensor``."""
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
        """Raise if ``func`` draws random values, which may depend on the modules of a unit only."""
        if draws(func):
            sharding = sharding_of(tensor)
            name = "a parameter" if sharding is None else sharding.name
            raise ShardedTensorError(f"{func} into {name}, which is already sharded")


def _check_plain(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if sharding_of(parameter) is not None:
            raise PlanError(f"{name} is sharded already; initialize the model before fully_shard")
        if parameter.is_meta:
            raise PlanError(
                f"{name} is on the meta device; to give it storage and values, call "
                "sw.fully_shard(model, init=sw.Initialization(seed))"
            )


def _in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())[::-1]


def innermost_unit(name: str, units: Container[str]) -> str:
    """The innermost of ``units`` that contains the module or parameter ``name``, or is it."""
    while name not in units:
        assert name, "no unit contains it"
        name = name.rpartition(".")[0]
    return name


def _without_value(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with NaN, to detect elements that are never written; without NaN, with 0."""
    return tensor.fill_(math.nan if _has_nan(tensor.dtype) else 0)


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _is_filled(current: Tensor | None, empty: Tensor, writes: _Writes) -> bool:
    if current is None or current is not empty:  # the module put another tensor in its place
        return current is None or not current.is_meta
    if _has_nan(current.dtype) and current.numel():
        real = torch.view_as_real(current) if current.is_complex() else current
        return not bool(real.amax().isnan())  # `real.isnan()` would take a quarter of its memory
    return writes.reached(current)


def _unfilled_error(root: nn.Module, names: Sequence[str]) -> PlanError:
    owner = type(root.get_submodule(names[0].rpartition(".")[0])).__name__
    return PlanError(
        f"{', '.join(names)}: not fully initialized, because {owner} has no reset_parameters() "
        f"that fills it; {_WAY_OUT}"
    )
