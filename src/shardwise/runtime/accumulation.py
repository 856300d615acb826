"""Gradients that wait for a reduction in a later backward of the same step.

With ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)``, or before the last
micro-batch of a step of a reproducible model, a backward leaves gradients in memory of the engine.
`AccumulatedGradients` owns them. In the meantime, ``p.grad`` is an `UnreducedGradient`. It has no
elements, but it can be dropped or set to zero like any gradient: ``zero_grad()`` and
``p.grad = None`` work as in one process.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._private import new_empty_subclass, pytree, without_tensor_functions
from shardwise.comm.communicator import communicator
from shardwise.errors import StepError
from shardwise.plan.chunks import ChunkedLayout
from shardwise.plan.layout import Layout
from shardwise.runtime.buffers import FlatBuffer
from shardwise.runtime.memory import Pool
from shardwise.runtime.parameters import FSDPParameter
from shardwise.tensor.mesh import DataParallelMesh

__all__ = [
    "READS_NO_ELEMENTS",
    "Accumulated",
    "AccumulatedGradients",
    "UnreducedGradient",
    "dtype_of_gradient",
    "is_unreduced",
    "reduced_part_of",
]

# Functions that read no elements; `__get__` reads an attribute, such as ``dtype`` or ``is_sparse``.
READS_NO_ELEMENTS = frozenset(
    {"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "requires_grad_"}
)
_ITSELF = frozenset({"detach", "detach_"})


class UnreducedGradient(Tensor):
    """``p.grad`` while gradients of ``p`` are not reduced; operations on its elements raise.

    Attributes:
        reduced: a gradient from an earlier reduction, or of a loss that contains the sharded
            parameter itself, to which they will be added; None if there is none.
    """

    reduced: Tensor | None
    _name: str  # of the parameter
    _set_to_zero: Callable[[], None]  # called by `zero_`
    _reason: str  # why operations raise an error
    _tell: Callable[[StepError], None] | None  # called with this error

    @property
    def data(self) -> Tensor:
        """This object, so that ``p.grad.data.zero_()`` works."""
        return self

    @data.setter
    def data(self, _value: Tensor) -> None:
        self.refuse("data")

    def zero_(self) -> "UnreducedGradient":
        """Set the accumulated gradients of the parameter to zero."""
        self._set_to_zero()
        if self.reduced is not None:
            self.reduced.zero_()
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """Empty memory, which tools that add up the memory of all tensors may count."""
        return torch.empty(0, device=self.device).untyped_storage()

    def to_local(self, **_options: object) -> NoReturn:
        self.refuse("to_local")

    def full_tensor(self, **_options: object) -> NoReturn:
        self.refuse("full_tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreducedGradient({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, _spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickle")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.refuse("deepcopy")

    def refuse(self, operation: str) -> NoReturn:
        """Raise the StepError of ``operation``, which needs the elements."""
        error = StepError(
            f"{self._name}.grad: {operation} needs the gradient, which is not reduced yet, because "
            f"{self._reason}, or drop the gradients with zero_grad()"
        )
        if self._tell is not None:
            self._tell(error)
        raise error

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name in _ITSELF:
            return args[0]
        if name == "_foreach_zero_":
            for one in args[0]:
                one.zero_()
            return None
        if name not in READS_NO_ELEMENTS:
            _first_in((args, kwargs)).refuse(name)
        with without_tensor_functions():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> "UnreducedGradient":
        gradient = _first_in((args, kwargs))
        is_added = func is torch.ops.aten.add_.Tensor and isinstance(args[1], DTensor)
        # In a reproducible model each rank would add a penalty as often as it has leaves.
        if not is_added or kwargs or gradient._tell is not None:
            gradient.refuse(str(func))
        with torch.no_grad():  # autograd adds the gradient of a penalty on the sharded parameter
            before, added = gradient.reduced, args[1]
            gradient.reduced = added.clone() if before is None else before + added
        return gradient


def is_unreduced(gradient: Tensor | None) -> TypeGuard[UnreducedGradient]:
    """Whether ``gradient`` has no elements yet."""
    return isinstance(gradient, UnreducedGradient)


def reduced_part_of(gradient: Tensor) -> Tensor | None:
    """The part of a parameter's ``grad`` that is reduced; None if there is none."""
    return gradient.reduced if isinstance(gradient, UnreducedGradient) else gradient


def _first_in(arguments: Any) -> UnreducedGradient:
    leaves = pytree.tree_leaves(arguments)
    return next(one for one in leaves if isinstance(one, UnreducedGradient))


class AccumulatedGradients:
    """The gradients of one layout that earlier backwards of the step have left::

        wholes   [world_size * S] each    this rank's own, not reduced at all
        partial  [world_size * S / row]   summed over this rank's row, awaiting its column

    There is one whole sum, to which each backward adds. In a reproducible model the backwards of a
    step are summed in a binary tree, so there are several: a sum of 2**k for each bit k that is set
    in the number of backwards, the largest first.

    They do not change until a backward ends: then `commit` adds the gradients that it leaves, and
    drops those that it has reduced. If it raises, `rollback` forgets it, so that a micro-batch that
    fails adds nothing and loses nothing. The price is memory: until a backward that reduces nothing
    has ended, its gradients are in buffers of their own.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[FSDPParameter],
        mesh: DataParallelMesh,
        own_pool: Pool,  # for `wholes`
        pool: Pool,  # for `partial`
        used: list[bool],
    ) -> None:
        """Begin with nothing; ``used`` is that of the `Gradients`, which `rollback` changes."""
        self.pool = pool
        self.used = used
        self._used_before = [False] * len(used)  # the backward that is running
        self._layout = layout
        self._parameters = parameters
        self._mesh = mesh
        self._own_pool = own_pool
        self._in_tree = mesh.leaves is not None
        self._wholes: list[_Whole] = []
        self._spare: list[FlatBuffer] = []  # without memory
        self._partial: Tensor | None = None
        self._gradients: list[UnreducedGradient | None] = [None] * len(layout.extents)
        self._is_held = [False] * len(layout.extents)  # ``p.grad`` was set to the one above
        self.is_active = False  # whether it was for any
        # A parameter was trainable in a backward since the last complete reduction, so any rank
        # may have accumulated a gradient for it, even if it has been frozen since. All ranks agree.
        self.is_awaited = [False] * len(layout.extents)
        # Of the backward that is running:
        self._is_taken = False  # a reduction includes the wholes
        self._sums: Tensor | None = None  # the partial sums that the next reduction adds
        # By position: ``p.grad`` since a reduction has replaced an `UnreducedGradient`.
        self._handed_over: dict[int, Tensor | None] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing awaits a reduction."""
        return self._partial is None and not any(any(one.written) for one in self._wholes)

    # -- in a backward ---------------------------------------------------------------------------

    def add_to(self, views: Sequence[Tensor], written: list[bool]) -> None:
        """Add the whole gradients to the ``views`` of a buffer that is about to be reduced."""
        if not self._is_taken and self._wholes:
            self._is_taken = True
            for whole in reversed(self._wholes):  # the smallest first
                self._add(views, written, whole)

    def take_sums(self) -> tuple[Tensor | None, bool]:
        """Return the sums over the row to add to a reduction, and whether to free them after it."""
        sums, self._sums = self._sums, None
        return sums, sums is not self._partial

    def keep_sums(self, sums: Tensor) -> None:
        """Keep ``sums`` over the row, in memory of `pool`, for a later reduction."""
        self._sums = sums

    def begin_hand_over(self, position: int) -> bool:
        """Put the gradient of an earlier reduction back into ``p.grad``.

        Returns:
            Whether ``p.grad`` was an `UnreducedGradient`.
        """
        gradient = self._gradients[position]
        if not self._is_held[position] or position in self._handed_over:
            return False
        assert gradient is not None
        sharded, before = self._parameters[position].sharded, gradient.reduced
        sharded.grad = None if before is None else before.clone()
        self._handed_over[position] = sharded.grad
        return True

    def end_hand_over(self, position: int) -> None:
        """Note that ``p.grad`` is now the reduced gradient."""
        self._handed_over[position] = self._parameters[position].sharded.grad

    def commit(
        self,
        fresh: FlatBuffer | None,
        written: Sequence[bool],
        *,
        is_complete: bool,
    ) -> None:
        """End a backward, which leaves gradients in ``fresh`` where ``written``.

        ``fresh`` may be released. ``is_complete``: the backward has reduced all gradients.
        """
        if not is_complete:
            pairs = zip(self.is_awaited, self._parameters, strict=True)
            self.is_awaited = [awaited or one.sharded.requires_grad for awaited, one in pairs]
        elif any(self.is_awaited):
            self.is_awaited = [False] * len(self.is_awaited)
        counts_zeros = self._in_tree and not is_complete
        if fresh is None and self._sums is None and not self.is_active and not counts_zeros:
            return
        if self._is_taken or (self._in_tree and is_complete):
            self._drop_wholes()
        if fresh is not None or counts_zeros:
            self._add_fresh(fresh, written)
        if self._sums is not self._partial:
            freed, self._partial = self._partial, self._sums
            self._free(freed)
        self._own_pool.free_idle()  # it would keep as much as is accumulated
        self._handed_over.clear()
        self._hold_all(self.used)

    def rollback(self) -> None:
        """Forget a backward that has raised."""
        for position, gradient in self._handed_over.items():
            sharded = self._parameters[position].sharded
            if sharded.grad is gradient:  # else `drop_replaced` drops what was accumulated
                sharded.grad = self._gradients[position]
        self._handed_over.clear()
        self.used[:] = self._used_before
        self._is_taken = False
        if self._sums is not self._partial:
            self._free(self._sums)
            self._sums = self._partial

    # -- between backwards -----------------------------------------------------------------------

    def drop_replaced(self) -> None:
        """Drop the gradients of parameters whose ``grad`` was set to None or to another tensor."""
        for position, parameter in enumerate(self._parameters):
            if self._is_held[position] and parameter.sharded.grad is not self._gradients[position]:
                self._set_to_zero(position)
                self._is_held[position] = self._used_before[position] = False
                for whole in self._wholes:
                    whole.written[position] = False
        if self.is_active and not any(self._is_held):
            self._drop_all()
        self.used[:] = self._used_before

    def drop(self) -> None:
        """Drop all gradients, and put those of earlier reductions back."""
        for position, parameter in enumerate(self._parameters):
            gradient = self._gradients[position]
            if gradient is not None and parameter.sharded.grad is gradient:
                parameter.sharded.grad = gradient.reduced
        self._drop_all()
        self.is_awaited = [False] * len(self.is_awaited)

    def snapshot(self) -> "Accumulated | None":
        """Return a copy; None if no rank has accumulated anything."""
        self.drop_replaced()
        if self.is_empty and not any(self.is_awaited):
            return None
        return Accumulated(
            [one.copy() for one in self._wholes],
            None if self._partial is None else self._partial.clone(),
            list(self._used_before),
            list(self._is_held),
            list(self.is_awaited),
            [
                None if not is_held or one is None or one.reduced is None else one.reduced.clone()
                for is_held, one in zip(self._is_held, self._gradients, strict=True)
            ],
        )

    def restore(self, copy: "Accumulated | None") -> None:
        """Return to the state of ``copy``."""
        self.drop()
        self.used[:] = self._used_before
        if copy is None:
            return
        self._wholes = [self._copy_of(one) for one in copy.wholes]
        if copy.partial is not None:
            size, dtype = copy.partial.numel(), copy.partial.dtype
            name = f"rows of {self._parameters[0].name} restored"
            self._sums = self.pool.allocate_tensor(size, dtype, name).copy_(copy.partial)
            self._partial = self._sums
        self._is_held = list(copy.is_held)
        self.is_awaited = list(copy.is_awaited)
        for position, parameter in enumerate(self._parameters):
            if copy.is_held[position]:
                parameter.sharded.grad = copy.reduced[position]
        self._hold_all(copy.used)
        self.used[:] = self._used_before

    # -- helpers ---------------------------------------------------------------------------------

    def _hold_all(self, used: Sequence[bool]) -> None:
        for position, parameter in enumerate(self._parameters):
            # One that was frozen since keeps what it has.
            may_have = parameter.sharded.requires_grad or self._is_held[position]
            is_partial = self._partial is not None and may_have
            is_whole = any(one.written[position] for one in self._wholes)
            self._is_held[position] = is_whole or is_partial
            if self._is_held[position]:
                self._hold(position)
        self.is_active = any(self._is_held)
        self._used_before = [self.is_active and one for one in used]

    def _hold(self, position: int) -> None:
        sharded = self._parameters[position].sharded
        gradient, current = self._gradients[position], sharded.grad
        if gradient is None or gradient.dtype != dtype_of_gradient(sharded):
            gradient = self._make(position)
        if current is not gradient:
            gradient.reduced = current
            sharded.grad = gradient

    def _make(self, position: int) -> UnreducedGradient:
        owner = weakref.ref(self)

        def set_to_zero() -> None:
            if (this := owner()) is not None:
                this._set_to_zero(position)

        parameter, leaves = self._parameters[position], len(self._mesh.own_leaves)
        reason = (
            f"the step of a reproducible model ends with the backward of the last of its {leaves} "
            "micro-batches on this rank (sw.leaves); first run all of them"
            if self._in_tree
            else "set_requires_gradient_sync or set_requires_all_reduce was False in the last "
            "backward; first run the last micro-batch with True"
        )
        shape, dtype = parameter.sharded.shape, dtype_of_gradient(parameter.sharded)
        device = parameter.sharded.device
        made: UnreducedGradient = new_empty_subclass(UnreducedGradient, shape, dtype, device)
        made._name, made._set_to_zero, made.reduced = parameter.name, set_to_zero, None
        made._reason, made._tell = reason, self._tell_ranks if self._in_tree else None
        self._gradients[position] = made
        return made

    def _tell_ranks(self, error: StepError) -> None:
        """Tell ranks that may have run more leaves than this one, and wait for its gradients."""
        if self._mesh.num_ranks > 1:
            communicator(self._mesh.world, self._own_pool.device).watch.abort(error)

    def _set_to_zero(self, position: int) -> None:
        """Set the gradient of a parameter to zero."""
        for whole in self._wholes:
            if whole.written[position]:
                whole.views[position].zero_()
            if self._in_tree:  # which also means zero; then `is_empty` may be true
                whole.written[position] = False
        if self._partial is not None:
            row, layout = self._mesh.row, self._layout
            shards = self._partial.view(layout.world_size // row.size, -1)
            extent = layout.extents[position]
            for rank, shard in enumerate(shards, start=row.index * len(shards)):
                start = layout.offset_in_shard(extent, rank)
                shard[start : start + layout.num_owned(extent, rank)].zero_()

    def _add_fresh(self, fresh: FlatBuffer | None, written: Sequence[bool]) -> None:
        new = _Whole(fresh, list(written))
        if self._wholes and not self._in_tree:
            self._add(self._wholes[0].views, self._wholes[0].written, new)
            return
        if fresh is not None:
            new.buffer = self._new_buffer()
            new.buffer.take(fresh)
        while self._wholes and self._wholes[-1].num_backwards == new.num_backwards:
            new = self._joined(self._wholes.pop(), new)
        self._wholes.append(new)

    def _joined(self, one: "_Whole", other: "_Whole") -> "_Whole":
        """Return the sum of two sums of equally many backwards, and free the memory of one."""
        if one.buffer is None:
            one, other = other, one
        self._add(one.views, one.written, other)
        self._release(other)
        one.num_backwards *= 2
        return one

    def _add(self, views: Sequence[Tensor], written: list[bool], whole: "_Whole") -> None:
        """Add ``whole`` to ``views``, whose elements are undefined where not ``written``."""
        for position, view in enumerate(views):
            if not whole.written[position]:
                if self._in_tree and written[position]:
                    view.add_(0.0)  # as if it was added: -0.0 + 0.0 is 0.0
            elif written[position]:
                view.add_(whole.views[position])
            else:
                view.copy_(whole.views[position])
                if self._in_tree:
                    view.add_(0.0)
                written[position] = True

    def _new_buffer(self) -> FlatBuffer:
        if self._spare:
            return self._spare.pop()
        layout = self._layout
        layout = layout.whole if isinstance(layout, ChunkedLayout) else layout
        dtype = layout.cast.reduce_dtype
        return FlatBuffer(layout, self._own_pool, dtype=dtype, suffix=" accumulated")

    def _copy_of(self, copy: "WholeCopy") -> "_Whole":
        buffer = None
        if copy.flat is not None:
            buffer = self._new_buffer()
            buffer.acquire()
            buffer.flat.copy_(copy.flat)
        return _Whole(buffer, list(copy.written), copy.num_backwards)

    def _release(self, whole: "_Whole") -> None:
        if whole.buffer is not None:
            whole.buffer.release()
            self._spare.append(whole.buffer)

    def _drop_all(self) -> None:
        self._drop_wholes()
        if self._sums is self._partial:
            self._free(self._partial)
        else:  # a reduction that failed may still read or write them
            for sums in (self._sums, self._partial):
                if sums is not None:
                    self.pool.disown(sums.untyped_storage())
        self._partial = self._sums = None
        self._is_held = [False] * len(self._is_held)
        self.is_active = False
        self._used_before = [False] * len(self.used)

    def _drop_wholes(self) -> None:
        self._is_taken = False
        for whole in self._wholes:
            self._release(whole)
        self._wholes = []

    def _free(self, partial: Tensor | None) -> None:
        if partial is not None:
            self.pool.free(partial.untyped_storage())


@dataclass(slots=True)
class _Whole:
    """A sum of whole gradients; gradients of parameters that are not ``written`` are zero."""

    buffer: FlatBuffer | None  # None: none is written
    written: list[bool]
    num_backwards: int = 1  # counted in reproducible models only

    @property
    def views(self) -> Sequence[Tensor]:
        return () if self.buffer is None else self.buffer.views

    def copy(self) -> "WholeCopy":
        flat = None if self.buffer is None else self.buffer.flat.clone()
        return WholeCopy(list(self.written), flat, self.num_backwards)


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """A copy of a sum of whole gradients."""

    written: list[bool]
    flat: Tensor | None  # [world_size * S]
    num_backwards: int


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A copy of what `AccumulatedGradients` have accumulated."""

    wholes: list[WholeCopy]
    partial: Tensor | None  # [world_size * S / row]
    used: list[bool]
    is_held: list[bool]
    is_awaited: list[bool]
    reduced: list[Tensor | None]  # of each `UnreducedGradient`


def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """The dtype that ``parameter.grad`` must have."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
