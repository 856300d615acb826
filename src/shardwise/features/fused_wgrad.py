"""Weight gradients computed directly in the reduce buffer, without an allocation or a copy.

The weight gradient of an `nn.Linear` is one matrix product, which can write to any memory; that of
an `nn.Embedding` is a sum of a few rows. `fully_shard` therefore gives these layers (unless their
class overrides forward) a forward whose backward writes into the weight's slot of the reduce
buffer. Autograd takes the returned tensor as ``.grad`` without copying it. If a weight is used
twice, for example by an embedding and the head, the second gradient is added to the first while
autograd holds that one. If a slot cannot be used (it has gradients of an earlier backward, or
another dtype), the gradient gets memory of its own. Wherever the result could be wrong, the layers
compute gradients as torch does: if another op uses the weight, with a hook on the weight, in
`torch.autograd.grad`, under autocast, in functorch, for complex numbers, and for embeddings on a
GPU.

A compiled backward is a graph of operators that is traced before there is a slot. In it, a single
custom operator computes the weight's gradient. The compiler does not look into that operator, which
claims the slot when backward runs and returns the gradient in it. The graph takes the weight's
number as a tensor, because a constant would make each layer compile a graph of its own.
"""

import itertools
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.utils import parametrize

from shardwise import _private
from shardwise.runtime.engine import Runtime
from shardwise.runtime.unit import FlatParameters, Unit

__all__ = [
    "InPlaceGradEmbedding",
    "InPlaceGradLinear",
    "has_plain_forward",
    "offer_slots",
    "replace_layers",
    "takes_slot",
]

_LEAST_ELEMENTS = 1 << 16  # below this, a Python autograd Function costs more than the copy

# The memory to compute a gradient in, and whether to add to the gradient that is already there.
_Offered = tuple[Tensor, bool] | None
_SlotOffer = Callable[[], _Offered]

_OFFER = "_shardwise_slot"
_NUMBER = "_shardwise_number"  # of a weight with an offer
_numbers = itertools.count()
_weights: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def replace_layers(root: nn.Module) -> None:
    """Make the linear and embedding layers of ``root`` compute weight gradients in their slots."""
    modules: Any = root.modules()
    layers: Any = ((nn.Linear, InPlaceGradLinear), (nn.Embedding, InPlaceGradEmbedding))
    for module, (plain, in_slot) in itertools.product(modules, layers):
        if has_plain_forward(module, plain):
            kind: Any = type(module)
            module.__class__ = _slot_class(kind, plain, in_slot)


def has_plain_forward(module: nn.Module, plain: Any) -> bool:
    """Whether ``module`` computes what a ``plain`` does, and its class may have a subclass."""
    kind: Any = type(module)
    if not isinstance(module, plain) or parametrize.is_parametrized(module):
        return False
    # Leave a class alone if subclassing it has side effects, such as a registration.
    is_plain = type(kind) is type and not hasattr(kind.__init_subclass__, "__func__")
    return is_plain and kind.forward is plain.forward and kind.__call__ is plain.__call__


def takes_slot(num_elements: int) -> bool:
    """Whether a gradient with so many elements is computed in a slot rather than copied to it."""
    return num_elements >= _LEAST_ELEMENTS


def offer_slots(runtime: Runtime) -> None:
    """Let backward claim the slots of the parameters of ``runtime`` in the reduce buffers."""
    for unit in runtime.units:
        for flat in unit.flats:
            for position, parameter in enumerate(flat.parameters):
                if takes_slot(parameter.dense.numel()):
                    claim = partial(_claim_slot, weakref.ref(unit), weakref.ref(flat), position)
                    _offer_slot(parameter.dense, claim)


def _claim_slot(
    unit_ref: weakref.ref[Unit], flat_ref: weakref.ref[FlatParameters], position: int
) -> tuple[Tensor, bool] | None:
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None or flat.gradients is None or not unit.expects_gradients:
        return None
    modules = flat.parameters[position].modules
    in_slot = all(
        isinstance(one, InPlaceGradLinear)
        or (isinstance(one, InPlaceGradEmbedding) and one.is_plain)
        for one in modules
    )
    return flat.gradients.claim(position, in_slot=in_slot)


class InPlaceGradLinear(nn.Linear):
    """A linear layer that computes its weight gradient in the reduce buffer."""

    def _get_name(self) -> str:
        return type(self).__name__.replace(InPlaceGradLinear.__name__, nn.Linear.__name__)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Linear)
        weight, number = self.weight, getattr(self.weight, _NUMBER, None)
        if number is None or weight.is_complex() or not _is_plain(input, weight):
            return super().forward(input)
        if input.dtype != weight.dtype:
            return super().forward(input)
        is_compiling, before = torch.compiler.is_compiling(), None
        number = number if is_compiling else None
        if not is_compiling and input.requires_grad and _private.has_saved_tensors_hooks():
            input = Saved.apply(input, weight)  # type: ignore[no-untyped-call]  # noqa: A001
            before = input.grad_fn
        output: Tensor = LinearFunction.apply(input, weight, self.bias, number, before)  # type: ignore[no-untyped-call]
        return output


class InPlaceGradEmbedding(nn.Embedding):
    """An embedding that computes its weight gradient in the reduce buffer."""

    def _get_name(self) -> str:
        return type(self).__name__.replace(InPlaceGradEmbedding.__name__, nn.Embedding.__name__)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Embedding)
        weight, number = self.weight, getattr(self.weight, _NUMBER, None)
        if number is None or not self.is_plain or not _is_plain(input, weight):
            return super().forward(input)
        number = number if torch.compiler.is_compiling() else None
        padding = -1 if self.padding_idx is None else self.padding_idx
        output: Tensor = EmbeddingFunction.apply(input, weight, padding, number)  # type: ignore[no-untyped-call]
        return output

    @property
    def is_plain(self) -> bool:
        """Whether the gradient is a plain sum of rows that can be added in a fixed order.

        On a GPU the host would have to wait for a fixed order.
        """
        is_special = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        return self.weight.is_cpu and not is_special


@cache
def _slot_class(kind: Any, plain: Any, in_slot: Any) -> Any:
    if kind is plain:
        return in_slot
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (in_slot, kind), names)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.is_autocast_enabled(x.device.type)
        and not _private.is_transformed_by_functorch()
    )


def _offer_slot(weight: Tensor, offer: _SlotOffer) -> None:
    """Let backward call ``offer`` for the slot of ``weight`` in the reduce buffer.

    ``offer`` returns None if the slot cannot be used.
    """
    number = next(_numbers)
    _weights[number] = weight
    weight.__dict__.update({_OFFER: offer, _NUMBER: torch.tensor(number, device="cpu")})


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
        """Compute the output for ``x`` [..., inputs] and ``weight`` [outputs, inputs].

        ``number`` is that of the weight in a compiled graph; None otherwise. ``before`` is the node
        of `Saved` if that has saved the inputs.
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


def _claim(node: Any) -> _Offered:
    """The slot of the weight whose AccumulateGrad is ``node``, if its gradient goes only there."""
    weight = getattr(node, "variable", None)
    offer: _SlotOffer | None = getattr(weight, _OFFER, None)
    if weight is None or offer is None:
        return None
    if torch.is_grad_enabled() or _private.gradient_hooks(weight):
        return None
    if len(_private.accumulated_gradient_hooks(weight)) > 1:  # not the engine's alone
        return None
    return offer() if _is_reached(node, in_doubt=False) else None


def _claim_empty(number: Tensor) -> _Offered:
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


def _multiply(rows: Tensor, inputs: Tensor, offered: _Offered) -> Tensor | None:
    """A linear layer's weight gradient; None if it was added to the gradient in the slot."""
    if offered is None:
        return rows @ inputs
    slot, is_begun = offered
    if is_begun:
        slot.addmm_(rows, inputs)
        return None
    return torch.mm(rows, inputs, out=slot)


def _add_rows(
    gradient: Tensor, x: Tensor, num_rows: int, padding: int, offered: _Offered
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
