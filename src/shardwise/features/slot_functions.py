"""The autograd Functions whose backward computes a weight's gradient in a slot.

In a compiled backward, which is a graph of operators that was traced before there was a slot, the
weight's gradient is one operator of ours. The compiler does not look into it: it runs when backward
does, claims the slot then, and returns the gradient in it. The graph has the weight's number in a
tensor, for a constant would make each layer compile a graph of its own.
"""

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from shardwise import _private

__all__ = [
    "CompiledEmbedding",
    "CompiledLinear",
    "Saved",
    "SlotEmbeddingFunction",
    "SlotLinearFunction",
    "SlotOffer",
    "offer_of",
    "offer_slot",
]

# Where to compute a gradient, and whether it is to be added to one that is there.
Offered = tuple[Tensor, bool] | None
SlotOffer = Callable[[], Offered]

_OFFER = "_shardwise_slot"
_NUMBER = "_shardwise_number"
_numbers = itertools.count()
_weights: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def offer_slot(weight: Tensor, offer: SlotOffer) -> None:
    """Have ``offer`` asked in backward for memory like ``weight``; None: there is none now."""
    number = next(_numbers)
    _weights[number] = weight
    weight.__dict__.update({_OFFER: offer, _NUMBER: torch.tensor(number, device="cpu")})


def offer_of(weight: Tensor) -> SlotOffer | Tensor | None:
    """The offer, or what a graph that is compiled now has in its place; None without one."""
    return getattr(weight, _NUMBER if torch.compiler.is_compiling() else _OFFER, None)


class Saved(torch.autograd.Function):
    """What a product's backward needs, saved before the product, as torch's own does.

    Or a checkpoint, which stops computing again when it has all that was saved, would compute the
    last product of a block for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class SlotLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offer: SlotOffer, before: Any
    ) -> Tensor:
        """``before``: the node of `_Saved`, if that has saved them."""
        if before is None:
            ctx.save_for_backward(x, weight)
        ctx.offer, ctx.before = offer, before
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., outputs]
        saved = ctx if ctx.before is None else ctx.before
        x, weight = saved.saved_tensors  # [..., inputs], [outputs, inputs]
        rows = gradient.reshape(-1, weight.shape[0])
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Torch cannot tell in `torch.autograd.grad`, which returns what comes there.
        needs_x = needs_x and _is_reached(ctx.next_functions[0][0], in_doubt=True)
        needs_weight = needs_weight and _is_reached(ctx.next_functions[1][0], in_doubt=True)
        of_weight = None
        if needs_weight:
            offered = ctx.offer() if _goes_to_grad(ctx.next_functions[1][0]) else None
            of_weight = _multiply(rows.t(), x.reshape(-1, weight.shape[1]), offered)
        of_x = gradient @ weight if needs_x else None
        return of_x, of_weight, rows.sum(0) if needs_bias else None, None, None


class SlotEmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int, offer: SlotOffer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.padding, ctx.offer, ctx.num_rows = padding, offer, weight.shape[0]
        return functional.embedding(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., width]
        (x,) = ctx.saved_tensors  # [...]
        offered = ctx.offer() if _goes_to_grad(ctx.next_functions[1][0]) else None
        of_weight = _add_rows(gradient, x, ctx.num_rows, ctx.padding, offered)
        return None, of_weight, None, None


class CompiledLinear(torch.autograd.Function):
    """`SlotLinearFunction` for compiled graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., outputs]
        x, weight, number = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        inputs = x.reshape(-1, weight.shape[1])
        of_weight = torch.ops.shardwise.linear_gradient(rows, inputs, number)
        return gradient @ weight, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class CompiledEmbedding(torch.autograd.Function):
    """`SlotEmbeddingFunction` for compiled graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, number)
        ctx.padding, ctx.num_rows = padding, weight.shape[0]
        return functional.embedding(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, number = ctx.saved_tensors
        of_weight = torch.ops.shardwise.embedding_gradient(
            gradients[0], x, ctx.num_rows, ctx.padding, number
        )
        return None, of_weight, None, None


def _claim(number: Tensor) -> Offered:
    """The empty slot of a weight; a compiled backward adds gradients of several uses by itself."""
    weight = _weights.get(int(number))
    offer: SlotOffer | None = getattr(weight, _OFFER, None)
    if weight is None or offer is None or not _goes_to_grad(get_gradient_edge(weight).node):
        return None
    offered = offer()
    return None if offered is None or offered[1] else offered


def _define(schema: str, kernel: Any, shape: Callable[..., tuple[int, int]]) -> None:
    # CUDA graphs would replay into the slot of the step in which they were captured.
    _library.define(schema, tags=[torch.Tag.cudagraph_unsafe])  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(
        f"shardwise::{name}", lambda *args: args[0].new_empty(shape(*args)), lib=_library
    )


_library = torch.library.Library("shardwise", "DEF")  # type: ignore[no-untyped-call]
_define(
    "linear_gradient(Tensor rows, Tensor inputs, Tensor number) -> Tensor",
    lambda rows, inputs, number: _multiply(rows.t(), inputs, _claim(number)),
    lambda rows, inputs, _: (rows.shape[1], inputs.shape[1]),
)
_define(
    "embedding_gradient(Tensor gradient, Tensor x, SymInt num_rows, int padding, Tensor number)"
    " -> Tensor",
    lambda gradient, x, num_rows, padding, number: _add_rows(
        gradient, x, num_rows, padding, _claim(number)
    ),
    lambda gradient, _x, num_rows, *_: (num_rows, gradient.shape[-1]),
)


def _multiply(rows: Tensor, inputs: Tensor, offered: Offered) -> Tensor | None:
    """A linear layer's gradient, of its weight; None if it was added to what is in the slot."""
    if offered is None:
        return rows @ inputs
    slot, is_begun = offered
    if is_begun:
        slot.addmm_(rows, inputs)
        return None
    return torch.mm(rows, inputs, out=slot)


def _add_rows(
    gradient: Tensor, x: Tensor, num_rows: int, padding: int, offered: Offered
) -> Tensor | None:
    """An embedding's gradient [rows, width]; None if it was added to what is in the slot."""
    if offered is None:
        whole: Tensor = torch.ops.aten.embedding_dense_backward(
            gradient, x, num_rows, padding, False
        )
        return whole
    slot, is_begun = offered
    if not is_begun:
        slot.zero_()
    numbers, places = x.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    # Summed on their own first: small ones would get lost in a large one, in bfloat16.
    total = torch.promote_types(slot.dtype, torch.float32)
    sums = gradient.new_zeros(len(numbers), slot.shape[1], dtype=total)
    sums.index_add_(0, places.flatten(), gradient.reshape(-1, slot.shape[1]).to(total))
    sums[numbers == padding] = 0
    slot.index_add_(0, numbers, sums.to(slot.dtype))
    return None if is_begun else slot


def _is_reached(node: Any, *, in_doubt: bool) -> bool:
    """Whether this backward runs ``node``; one to some tensors only, of a pipeline, may not."""
    try:
        return _private.will_execute(node)
    except RuntimeError:
        return in_doubt


def _goes_to_grad(node: Any) -> bool:
    """Whether autograd will hand a gradient to ``node``, an AccumulateGrad, and to nothing else."""
    weight = getattr(node, "variable", None)
    if torch.is_grad_enabled() or weight is None or _private.gradient_hooks(weight):
        return False
    return _is_reached(node, in_doubt=False)
