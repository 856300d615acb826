"""Records the operations that run on fake tensors, and the memory of their results."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise._private import OpOverload, TorchDispatchMode, pytree, without_torch_functions
from shardwise.forecast.work import Kind, Operation, Segment
from shardwise.schedule.events import EventKind

__all__ = ["COLLECTIVES", "Recorder", "tensors_in"]

COLLECTIVES = "shardwise_forecast"  # namespace of the operators that represent collectives

# Operators that launch no kernel.
_WITHOUT_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Operators that read selected rows, not the whole tensor.
_GATHERS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that are allocated while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[Segment] = []
        self.in_backward = False
        self.in_unit = False  # in the forward of a unit
        self._event: tuple[EventKind, int] | None = None
        self._operations: list[Operation] = []
        self._start = self._peak = self._allocated = 0
        self._storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # by id
        self._num_storages = 0
        # The storage of the last sum of gradients, and the bytes allocated with it.
        self._gradient_sum: tuple[int, int] | None = None
        # The peak if embeddings add rows in place; see `Segment.added_rows_bytes`.
        self._in_place_peak = 0
        # The number of the storage of the last gradient of an embedding (an id may be that of a
        # later storage), and `_in_place_peak` before it.
        self._embedding_gradient = -1, 0
        # The peak without gradients in slots (`Segment.in_slot_bytes`), and the bytes of those that
        # are alive.
        self._slot_peak = self._in_slots = 0
        # The number of the storage of a weight whose gradient is computed next, its bytes and unit.
        self._next_in_slot: tuple[int, int, int] | None = None

    def begin(self, kind: EventKind, unit: int) -> None:
        """Begin the forward or backward of a unit, which ends the previous segment."""
        self.end()
        self._event = kind, unit

    def end(self) -> None:
        """End the last segment."""
        self._end_gradient_sum()
        if self._event is not None:
            kind, unit = self._event
            operations = tuple(self._operations)
            memory = self._start, self._peak, self._allocated
            added = self._peak - self._in_place_peak
            in_slot = self._peak - self._slot_peak
            self.segments.append(Segment(kind, unit, operations, *memory, added, in_slot))
            self._operations.clear()
        self._start = self._peak = self._in_place_peak = self._allocated
        self._slot_peak = self._allocated - self._in_slots

    def expect_in_slot(self, weight: Tensor, unit: int) -> None:
        """Expect a product that is the gradient of ``weight``, in the backward of ``unit``.

        The engine may compute it in the weight's slot of the unit's reduce buffer.
        """
        self._next_in_slot = self._number_of(weight), weight.nbytes, unit

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of ``tensors``: parameters, buffers or the batch."""
        for tensor in tensors:
            self._number_of(tensor, is_counted=False)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:  # autograd asks two or three times per operation
            return args[0].device
        kwargs = kwargs or {}
        with without_torch_functions():
            result = _result_of(func, args, kwargs)
            if func.namespace != "prim":
                self._record(func, args, kwargs, result)
        return result

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._end_gradient_sum()
        inputs = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(result))
        reads = [(self._number_of(tensor), _num_bytes(tensor)) for tensor in inputs]
        known, peak, in_place_peak = self._num_storages, self._peak, self._in_place_peak
        slot_peak = self._slot_peak
        name, is_in_place = _name_of(func)
        in_slot = name == "mm" and self._is_expected(reads, outputs[0])
        writes = [(self._number_of(one, in_slot=in_slot), _num_bytes(one)) for one in outputs]
        if name == "embedding_dense_backward":
            self._embedding_gradient = writes[0][0], in_place_peak
        if name == "add" and self.in_backward and not torch.is_grad_enabled():
            embedding, before = self._embedding_gradient
            if embedding in (number for number, _ in reads):
                in_place_peak = self._in_place_peak = before
            if not inputs[0]._is_view():
                first = id(inputs[0].untyped_storage())
                self._gradient_sum, self._peak = (first, self._allocated), peak
                self._in_place_peak, self._slot_peak = in_place_peak, slot_peak
        is_view = self._num_storages == known and not is_in_place
        if is_view or name in _WITHOUT_KERNEL:
            return
        if name == "copy_":
            reads = reads[1:]
        elif name in _GATHERS:
            written = sum(size for _, size in writes)
            reads = [(number, min(size, written)) for number, size in reads]
        kind, flops, shape = _cost_of(func, name, args, kwargs, result)
        self._operations.append(
            Operation(
                name=args[1] if kind is Kind.COLLECTIVE else _SHORT_NAMES.get(name, name),
                kind=kind,
                flops=flops,
                shape=shape,
                itemsize=_itemsize(inputs, outputs),
                reads=tuple(reads),
                writes=tuple(writes),
                is_causal=kind is Kind.ATTENTION and _is_causal(func, args, kwargs),
                # During backward, grad mode is enabled only for recomputation.
                is_recomputed=self.in_backward and (self.in_unit or torch.is_grad_enabled()),
                axis=args[2] if kind is Kind.COLLECTIVE else "",
            )
        )

    def _end_gradient_sum(self) -> None:
        """Count the result of autograd's last sum of gradients, unless the sum was in place.

        Autograd adds the second gradient of a tensor to the first one in place if nothing else
        refers to the first, and the first is not a view. While operations are recorded, it never
        adds in place, but frees the first gradient right after the sum.
        """
        if self._gradient_sum is not None and self._gradient_sum[0] in self._storages:
            self._raise_peak(self._gradient_sum[1])
        self._gradient_sum = None

    def _is_expected(self, reads: list[tuple[int, int]], product: Tensor) -> bool:
        """Whether ``product`` is the gradient of `expect_in_slot`, not that of an input."""
        if self._next_in_slot is None or self._event is None:
            return False
        weight, num_bytes, unit = self._next_in_slot
        if weight in (number for number, _ in reads) or product.nbytes != num_bytes:
            return False
        self._next_in_slot = None
        return self._event[1] == unit

    def _number_of(self, tensor: Tensor, *, is_counted: bool = True, in_slot: bool = False) -> int:
        """Return the number of the storage of ``tensor``, and count the storage if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._storages.get(key)
        if known is not None:
            return known[0]
        number = self._num_storages
        self._num_storages += 1
        size = storage.nbytes() if is_counted else 0
        freed = partial(self._freed, key, size, size * in_slot)
        self._storages[key] = number, weakref.ref(storage, freed)
        self._allocated += size
        self._in_slots += size * in_slot
        self._raise_peak(self._allocated)
        return number

    def _raise_peak(self, num_bytes: int) -> None:
        self._peak = max(self._peak, num_bytes)
        self._in_place_peak = max(self._in_place_peak, num_bytes)
        self._slot_peak = max(self._slot_peak, num_bytes - self._in_slots)

    def _freed(self, key: int, size: int, in_slots: int, _storage: object) -> None:
        del self._storages[key]
        self._allocated -= size
        self._in_slots -= in_slots


def _result_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, also a grouped product in a dtype that only its real kernels take."""
    if _name_of(func)[0] != "_grouped_mm":
        return func(*args, **kwargs)
    dtypes = {one.dtype for one in tensors_in((args, kwargs)) if one.is_floating_point()}
    if len(dtypes) > 1 or dtypes & {torch.bfloat16, torch.float64}:
        return func(*args, **kwargs)
    [dtype] = dtypes

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    args, kwargs = pytree.tree_map_only(Tensor, narrow, (args, kwargs))
    return func(*args, **kwargs).to(dtype)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(values, Tensor):
        yield values
    elif type(values) in (tuple, list):  # as in most calls, and faster than pytree
        for value in values:
            yield from tensors_in(value)
    elif values is not None and not isinstance(values, (int, float, str)):
        yield from (one for one in pytree.tree_leaves(values) if isinstance(one, Tensor))


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; repeated elements (``expand``) count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def _itemsize(inputs: list[Tensor], outputs: list[Tensor]) -> int:
    tensors = [*inputs, *outputs]
    floating = (tensor for tensor in tensors if tensor.is_floating_point())
    return next(floating, tensors[0]).element_size()


@cache
def _name_of(func: OpOverload) -> tuple[str, bool]:
    """Return the name of an operator without its overload, and whether it works in place."""
    _, name, overload = str(func).split(".")  # such as "aten.mul_.Tensor"
    return name, name.endswith("_") or overload.endswith("out")


# -- what an operation computes ------------------------------------------------------------------

_Shape = tuple[int, ...]

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_SHORT_NAMES = {
    _FLASH: "scaled_dot_product_attention",
    f"{_FLASH}_backward": "scaled_dot_product_attention_backward",
}


def _cost_of(
    func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Kind, int, _Shape]:
    if func.namespace == COLLECTIVES:
        return Kind.COLLECTIVE, 0, ()
    if "attention" in name:
        shape = _attention_shape(name, args)
        return Kind.ATTENTION, _attention_flops(name, shape), shape
    if name in _PRODUCTS:
        batch, m, n, k = shape = _PRODUCTS[name](args)
        return Kind.MATMUL, 2 * batch * m * n * k, shape
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return Kind.MEMORY, 0, ()
    flops = int(count(*args, **kwargs, out_val=result))
    output = next(tensors_in(result))
    n = output.shape[1]  # a convolution: channels
    m = output.numel() // n
    return Kind.MATMUL, flops, (1, m, n, flops // (2 * m * n))


def _mm(left: Tensor, right: Tensor) -> _Shape:
    return 1, left.shape[0], right.shape[1], left.shape[1]


def _bmm(left: Tensor, right: Tensor) -> _Shape:
    return *left.shape[:2], right.shape[2], left.shape[2]


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor) -> _Shape:
    """Return the shape of a grouped product, which is assumed to have groups of equal size."""
    groups = offsets.shape[0]
    if right.dim() == 2:  # noqa: PLR2004
        return groups, left.shape[0], right.shape[1], left.shape[1] // groups
    return groups, left.shape[0] // groups, right.shape[2], left.shape[1]


_PRODUCTS: dict[str, Callable[[tuple[Any, ...]], _Shape]] = {
    "mm": lambda args: _mm(*args[:2]),
    "addmm": lambda args: _mm(*args[1:3]),
    "bmm": lambda args: _bmm(*args[:2]),
    "baddbmm": lambda args: _bmm(*args[1:3]),
    "_grouped_mm": lambda args: _grouped_mm(*args[:3]),
}


def _attention_shape(name: str, args: tuple[Any, ...]) -> _Shape:
    first = int("backward" in name)  # after the gradient of the output
    query, key = args[first : first + 2]
    batch, heads, queries, head_dim = query.shape
    return batch, heads, queries, key.shape[2], head_dim


def _attention_flops(name: str, shape: _Shape) -> int:
    """Return the FLOPs of two products in forward, or of five in backward.

    Backward recomputes the scores, and has two products for each product of forward.
    """
    batch, heads, queries, keys, head_dim = shape
    products = 5 if "backward" in name else 2
    return products * 2 * batch * heads * queries * keys * head_dim


def _is_causal(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return bool(bound.get("is_causal", False))
