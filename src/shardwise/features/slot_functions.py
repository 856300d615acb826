"""The autograd Functions whose backward computes a weight's gradient in its slot.

A compiled backward is a graph of operators that is traced before there is a slot. In it, a single
custom operator computes the weight's gradient. The compiler does not look into that operator, which
claims the slot when backward runs and returns the gradient in it. The graph takes the weight's
number as a tensor, because a constant would make each layer compile a graph of its own.
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

__all__ = ["EmbeddingFunction", "LinearFunction", "Saved", "SlotOffer", "number_of", "offer_slot"]

# The memory to compute a gradient in, and whether to add to the gradient that is already there.
Offered = tuple[Tensor, bool] | None
SlotOffer = Callable[[], Offered]

_OFFER = "_shardwise_slot"
_NUMBER = "_shardwise_number"
_numbers = itertools.count()
_weights: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def offer_slot(weight: Tensor, offer: SlotOffer) -> None:
    """Let backward call ``offer`` for the slot of ``weight`` in the reduce buffer.

    ``offer`` returns None if the slot cannot be used.
    """
    number = next(_numbers)
    _weights[number] = weight
    weight.__dict__.update({_OFFER: offer, _NUMBER: torch.tensor(number, device="cpu")})


def number_of(weight: Tensor) -> Tensor | None:
    """The number of a weight with an offer; None without one."""
    return getattr(weight, _NUMBER, None)


class Saved(torch.autograd.Function):
    """Saves the inputs of a matrix product before computing it, as torch's own linear does.

    A checkpoint stops recomputing once it has all saved tensors. If they were saved after the
    product, it would recompute the last product of a block for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: Tensor | None,
        before: Any,
    ) -> Tensor:
        """Compute the output.

        Args:
            ctx: the context.
            x: [..., inputs].
            weight: [outputs, inputs].
            bias: [outputs].
            number: number of the weight in a compiled graph; None otherwise.
            before: the node of `Saved` if that has saved the inputs.
        """
        ctx.number, ctx.before = number, before
        if before is None:
            ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., outputs]
        saved = ctx if ctx.before is None else ctx.before
        x, weight = saved.saved_tensors
        rows, inputs = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_weight = None
        if ctx.number is not None:
            of_weight = torch.ops.shardwise.linear_gradient(rows, inputs, ctx.number)
        else:
            (x_node, _), (weight_node, _), *_ = ctx.next_functions
            # In `torch.autograd.grad`, torch cannot tell which gradients are needed.
            needs_x = needs_x and _is_reached(x_node, in_doubt=True)
            if needs_weight and _is_reached(weight_node, in_doubt=True):
                of_weight = _multiply(rows.t(), inputs, _claim(weight_node))
        of_x = gradient @ weight if needs_x else None
        return of_x, of_weight, rows.sum(0) if needs_bias else None, None, None


class EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int, number: Tensor | None) -> Tensor:
        """Compute the output; ``number`` is as in `LinearFunction`."""
        ctx.save_for_backward(x)
        ctx.padding, ctx.num_rows, ctx.number = padding, weight.shape[0], number
        return functional.embedding(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., width]
        (x,) = ctx.saved_tensors  # [...]
        if ctx.number is not None:
            of_weight = torch.ops.shardwise.embedding_gradient(
                gradient, x, ctx.num_rows, ctx.padding, ctx.number
            )
        else:
            offered = _claim(ctx.next_functions[1][0])
            of_weight = _add_rows(gradient, x, ctx.num_rows, ctx.padding, offered)
        return None, of_weight, None, None


def _claim(node: Any) -> Offered:
    """The slot of the weight whose AccumulateGrad is ``node``, if its gradient goes only there."""
    weight = getattr(node, "variable", None)
    offer: SlotOffer | None = getattr(weight, _OFFER, None)
    if weight is None or offer is None:
        return None
    if torch.is_grad_enabled() or _private.gradient_hooks(weight):
        return None
    return offer() if _is_reached(node, in_doubt=False) else None


def _claim_empty(number: Tensor) -> Offered:
    """The slot of a weight, if empty: a compiled backward itself adds gradients of several uses."""
    weight = _weights.get(int(number))
    offered = None if weight is None else _claim(get_gradient_edge(weight).node)
    return None if offered is None or offered[1] else offered


def _define(schema: str, kernel: Any, shape: Callable[..., tuple[int, int]]) -> None:
    # A CUDA graph would replay into the slot of the step that captured it.
    _library.define(schema, tags=[torch.Tag.cudagraph_unsafe])  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(
        f"shardwise::{name}", lambda *args: args[0].new_empty(shape(*args)), lib=_library
    )


_library = torch.library.Library("shardwise", "DEF")  # type: ignore[no-untyped-call]
_define(
    "linear_gradient(Tensor rows, Tensor inputs, Tensor number) -> Tensor",
    lambda rows, inputs, number: _multiply(rows.t(), inputs, _claim_empty(number)),
    lambda rows, inputs, _: (rows.shape[1], inputs.shape[1]),
)
_define(
    "embedding_gradient(Tensor gradient, Tensor x, SymInt num_rows, int padding, Tensor number)"
    " -> Tensor",
    lambda gradient, x, num_rows, padding, number: _add_rows(
        gradient, x, num_rows, padding, _claim_empty(number)
    ),
    lambda gradient, _x, num_rows, *_: (num_rows, gradient.shape[-1]),
)


def _multiply(rows: Tensor, inputs: Tensor, offered: Offered) -> Tensor | None:
    """A linear layer's weight gradient; None if it was added to the gradient in the slot."""
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
    """An embedding's gradient [rows, width]; None if it was added to the gradient in the slot."""
    if offered is None:
        dense: Tensor = torch.ops.aten.embedding_dense_backward(
            gradient, x, num_rows, padding, False
        )
        return dense
    slot, is_begun = offered
    if not is_begun:
        slot.zero_()
    numbers, positions = x.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    # Sum these gradients first: in bfloat16, adding small values to a large one would lose them.
    total = torch.promote_types(slot.dtype, torch.float32)
    sums = gradient.new_zeros(len(numbers), slot.shape[1], dtype=total)
    sums.index_add_(0, positions.flatten(), gradient.reshape(-1, slot.shape[1]).to(total))
    sums[numbers == padding] = 0
    slot.index_add_(0, numbers, sums.to(slot.dtype))
    return None if is_begun else slot


def _is_reached(node: Any, *, in_doubt: bool) -> bool:
    """Whether this backward runs ``node``; a pipeline's backward to some tensors may not."""
    try:
        return _private.will_execute(node)
    except RuntimeError:
        return in_doubt
