"""Records every operator, with the stream it would run on and the bytes that it uses."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.streams.clock import Stream, Timeline
from tests.streams.memory import HOST, PINNED, Place
from tests.streams.raw import poison, raw
from tests.streams.simulation import Problem, Simulation, location

__all__ = ["Creation", "Recorder"]

# These change what a tensor views, but no memory.
_METADATA = {"aten::set_", "aten::resize_", "aten::lift_fresh"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone"}
# The host needs the result of these, or its size.
_WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
}
_UNDEFINED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


@dataclass(frozen=True)
class Operands:
    """The tensors of one call."""

    reads: list[Tensor]
    writes: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.reads, *self.writes]


class Creation(threading.local):
    """The place that a running factory was given, which its operator does not see."""

    place: Place | None = None
    is_async = False

    @contextmanager
    def at(self, place: Place | None, *, is_async: bool = False) -> Iterator[None]:
        before = self.place, self.is_async
        self.place, self.is_async = place, is_async
        try:
            yield
        finally:
            self.place, self.is_async = before


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of the thread that entered it in a `Simulation`."""

    def __init__(self, simulation: Simulation, creation: Creation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulation = simulation
        self._creation = creation

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # its local tensor is dispatched as well
        if _is_composite(func):  # called from below autograd
            with self:
                return func.decompose(*args, **kwargs)
        operands = _operands(func, args, kwargs)
        name = func._schema.name
        if name in _METADATA:
            return func(*args, **kwargs)
        return self._run(func, args, kwargs, operands)

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Operands
    ) -> Any:
        simulation, name = self._simulation, func._schema.name
        known = {tensor.untyped_storage()._cdata for tensor in operands.all}
        places = [simulation.place_of(tensor) for tensor in operands.all]
        target = self._creation.place
        timeline = simulation.timeline_for(places if target is None else [*places, target])
        defers = isinstance(timeline, Stream) and timeline.is_late
        if operands.writes and defers:
            result = func(*args, **kwargs) if not operands.writes else _returned(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        outputs = [one for one in _leaves(result) if _is_real(one)]
        fresh = [one for one in outputs if one.untyped_storage()._cdata not in known]
        if outputs and not fresh and not operands.writes:
            return result  # a view
        if not outputs and not operands.all:
            return result
        self._add(fresh, places, timeline, name)
        number = simulation.begin(timeline)
        what = f"{name} in {location()}"
        self._check_places(name, operands, places, what)
        for tensor in operands.reads:
            simulation.use(tensor, timeline, number, what, is_write=False)
        for tensor in [*operands.writes, *(fresh if name not in _UNDEFINED else [])]:
            simulation.use(tensor, timeline, number, what, is_write=True)
        if defers and name not in _UNDEFINED:
            assert isinstance(timeline, Stream)
            kept = simulation.memory.owned_by(timeline, [*operands.all, *fresh])
            _defer(timeline, func, args, kwargs, operands, fresh, kept)
        if isinstance(timeline, Stream):
            self._wait(name, timeline, args, kwargs, fresh)
        return result

    def _add(self, fresh: list[Tensor], places: list[Place], timeline: Timeline, name: str) -> None:
        """Add new tensors: on the device if an operand is on the device."""
        place = self._creation.place
        if place is None:
            place = next((one for one in places if one.is_device), HOST)
        for tensor in fresh:
            storage = tensor.untyped_storage()
            if not self._simulation.memory.knows(storage):
                made_by = f"{name} in {location()}"
                self._simulation.memory.add(storage, place, timeline, made_by)

    def _check_places(self, name: str, operands: Operands, places: list[Place], what: str) -> None:
        """Check that all operands, except numbers, are on one device."""
        kinds = {
            place.device
            for tensor, place in zip(operands.all, places, strict=True)
            if tensor.dim() or place.is_device
        }
        if len(kinds) > 1 and name not in _COPIES and not name.startswith("c10d"):
            self._simulation.report(Problem.PLACE, f"{what} mixes {sorted(map(str, kinds))}")

    def _wait(
        self,
        name: str,
        stream: Stream,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: list[Tensor],
    ) -> None:
        """Make the host wait if the operator waits on a device."""
        is_mask = name == "aten::index" and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in _WAITS or is_mask:
            self._simulation.block_host(stream, stream.clock, stream.position, name)
        elif name in _COPIES:
            pair = args[:2] if name == "aten::copy_" else (fresh[0], args[0]) if fresh else ()
            if len(pair) == 2 and self._blocks(*pair, _is_async(args, kwargs, self._creation)):
                self._simulation.block_host(stream, stream.clock, stream.position, "a copy")

    def _blocks(self, dst: Tensor, src: Tensor, is_async: bool) -> bool:
        places = [self._simulation.place_of(tensor) for tensor in (dst, src)]
        on_host = [place for place in places if not place.is_device]
        if len(on_host) != 1:
            return False
        return on_host[0] != PINNED or not is_async  # the device does the cast


@cache
def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def _is_wrapper(kind: type) -> bool:
    return (
        kind is not Tensor
        and getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    )


def _is_real(value: object) -> bool:
    """Whether ``value`` is a plain tensor, not a wrapper."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
        and not _is_wrapper(type(value))
        and not value.is_meta
    )


def _is_async(args: tuple[Any, ...], kwargs: dict[str, Any], creation: Creation) -> bool:
    positional = args[2] if len(args) > 2 else False
    return bool(creation.is_async or kwargs.get("non_blocking", False) or positional)


@cache
def _written(func: Any) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Return whether each positional argument is written, and the names of those that are."""
    flags = [
        (a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments
    ]
    if func._schema.name.startswith("c10d::"):
        flags = [(name, True) for name, _ in flags]  # not marked in their schemas
    return tuple(flag for _, flag in flags), frozenset(name for name, flag in flags if flag)


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands:
    flags, names = _written(func)
    operands = Operands([], [])
    pairs = [(flags[i], one) for i, one in enumerate(args)]
    pairs += [(name in names, one) for name, one in kwargs.items()]
    for is_written, value in pairs:
        tensors = [one for one in _leaves(value) if _is_real(one)]
        (operands.writes if is_written else operands.reads).extend(tensors)
    return operands


def _leaves(value: Any) -> Sequence[Any]:
    """What an argument or a result consists of; nothing in a number or another option."""
    if isinstance(value, Tensor):
        return (value,)
    return pytree.tree_leaves(value) if isinstance(value, (tuple, list, dict)) else ()


# -- late execution -------------------------------------------------------------------------------


def _returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an in-place operator without running it."""
    flags, names = _written(func)
    written = [one for flag, one in zip(flags, args, strict=False) if flag]
    written += [one for name, one in kwargs.items() if name in names]
    count = len(func._schema.returns)
    if not count:
        return None
    return written[0] if count == 1 else tuple(written[:count])


def _defer(
    stream: Stream,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Operands,
    fresh: list[Tensor],
    kept: list[torch.UntypedStorage],
) -> None:
    """Run an operator when something waits for ``stream``, on the present memory."""
    late_args, late_kwargs = pytree.tree_map_only(Tensor, raw, (args, kwargs))
    late_outputs = [raw(one) for one in fresh]
    for tensor in late_outputs:
        poison(tensor)

    def job(kept: list[torch.UntypedStorage] = kept) -> None:  # noqa: ARG001 - until it has run
        with _disable_current_modes(), torch.no_grad():
            result = func(*late_args, **late_kwargs)
            if operands.writes:
                return
            made = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
            for into, one in zip(late_outputs, made, strict=True):
                into.copy_(one)

    stream.queue(job)
