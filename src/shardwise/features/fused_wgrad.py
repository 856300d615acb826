"""Weight gradients computed where they are reduced from: nothing is allocated, nothing copied.

The weight of an `nn.Linear` gets its gradient from one product of matrices, and that can write to
any memory; that of an `nn.Embedding` from a few rows. So `fully_shard` gives such layers (unless
their class has a forward of its own) a forward whose backward writes into the weight's slot of the
reduce buffer. Autograd takes what backward returns for ``.grad`` without copying it. The gradient
of a second use of the weight, as of one that embedding and head share, is added to the first while
autograd holds that. Where a slot is no place for it (it has gradients of an earlier backward, or
another dtype), it gets memory of its own; and wherever any of this could be wrong, it comes as
always: after use in another op, with a hook on the weight, in `torch.autograd.grad`, under
autocast, in functorch, of complex numbers, and of embeddings on a GPU.
"""

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from shardwise import _private
from shardwise.runtime.engine import Runtime
from shardwise.runtime.flat_parameters import FlatParameters
from shardwise.runtime.scheduler import Scheduler

__all__ = [
    "SlotEmbedding",
    "SlotLinear",
    "computes_in_slot",
    "let_compute_in_slot",
    "offer_slots",
    "replace_layers",
]

_OFFER = "_shardwise_slot"
_LEAST_ELEMENTS = 1 << 16  # a Python function costs autograd more than copying fewer does

# Where to compute a gradient, and whether it is to be added to one that is there.
SlotOffer = Callable[[], tuple[Tensor, bool] | None]


def replace_layers(root: nn.Module) -> None:
    """Have the layers of ``root`` ask their weights in backward where to compute gradients."""
    for module in root.modules():
        let_compute_in_slot(module)


def offer_slots(runtime: Runtime) -> None:
    """Have the parameters of ``runtime`` answer with their slots of the reduce buffers."""
    scheduler = weakref.ref(runtime.scheduler)
    for index, unit in enumerate(runtime.units):
        for flat in unit.flats:
            for position, parameter in enumerate(flat.parameters):
                claim = partial(_claim_slot, scheduler, index, weakref.ref(flat), position)
                offer_slot(parameter.dense, claim)


def let_compute_in_slot(module: nn.Module) -> None:
    """Have a layer compute its weight's gradient where the weight offers to."""
    kind = type(module)
    for plain, in_slot in ((nn.Linear, SlotLinear), (nn.Embedding, SlotEmbedding)):
        if isinstance(module, plain) and not parametrize.is_parametrized(module):
            # A class that has a word in what derives from it, such as a registry, is left alone.
            is_plain = type(kind) is type and not hasattr(kind.__init_subclass__, "__func__")
            if is_plain and kind.forward is plain.forward and kind.__call__ is plain.__call__:
                module.__class__ = _slot_class(kind, plain, in_slot)  # type: ignore[arg-type]


def _claim_slot(
    scheduler_ref: weakref.ref[Scheduler],
    index: int,
    flat_ref: weakref.ref[FlatParameters],
    position: int,
) -> tuple[Tensor, bool] | None:
    scheduler, flat = scheduler_ref(), flat_ref()
    if scheduler is None or flat is None:
        return None
    in_slot = all(map(computes_in_slot, flat.parameters[position].modules))
    return scheduler.units[index].claim_gradient(flat, position, in_slot=in_slot)


def offer_slot(weight: nn.Parameter, offer: SlotOffer) -> None:
    """Have ``offer`` asked in backward for memory like ``weight``; None: there is none now."""
    if weight.numel() >= _LEAST_ELEMENTS:
        weight.__dict__[_OFFER] = offer


def computes_in_slot(module: nn.Module | None) -> bool:
    """Whether a module asks its weight for memory in backward."""
    if isinstance(module, SlotEmbedding):
        return module.is_plain
    return isinstance(module, SlotLinear)


class SlotLinear(nn.Linear):
    """A linear layer of a sharded model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Linear)
        weight: Tensor = self.weight
        offer = _offer_of(weight)
        is_real = input.dtype == weight.dtype and not weight.is_complex()
        if offer is None or not is_real or not _is_plain(input, weight):
            return super().forward(input)
        before = None
        if input.requires_grad and _private.has_saved_tensors_hooks():
            input = _Saved.apply(input, weight)  # type: ignore[no-untyped-call]  # noqa: A001
            before = input.grad_fn
        output: Tensor = _Linear.apply(input, weight, self.bias, offer, before)  # type: ignore[no-untyped-call]
        return output


class SlotEmbedding(nn.Embedding):
    """An embedding of a sharded model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Embedding)
        weight: Tensor = self.weight
        offer = _offer_of(weight)
        if offer is None or not self.is_plain or not _is_plain(input, weight):
            return super().forward(input)
        padding = -1 if self.padding_idx is None else self.padding_idx
        output: Tensor = _Embedding.apply(input, weight, padding, offer)  # type: ignore[no-untyped-call]
        return output

    @property
    def is_plain(self) -> bool:
        """Whether its gradient is that of rows, and can be added in an order that stays the same.

        On a GPU the host would have to wait for that.
        """
        is_special = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        return self.weight.is_cpu and not is_special


@cache
def _slot_class(kind: Any, plain: Any, in_slot: Any) -> Any:
    if kind is plain:
        return in_slot
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (in_slot, kind), names)


class _Saved(torch.autograd.Function):
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


class _Linear(torch.autograd.Function):
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
        needs_x = needs_x and _is_wanted(ctx.next_functions[0][0])
        needs_weight = needs_weight and _is_wanted(ctx.next_functions[1][0])
        of_weight = None
        if needs_weight:
            offered = ctx.offer() if _goes_to_grad(ctx.next_functions[1][0]) else None
            inputs = x.reshape(-1, weight.shape[1])
            if offered is None:
                of_weight = rows.t() @ inputs
            else:
                slot, is_begun = offered
                if is_begun:
                    slot.addmm_(rows.t(), inputs)
                else:
                    of_weight = torch.mm(rows.t(), inputs, out=slot)
        of_x = gradient @ weight if needs_x else None
        return of_x, of_weight, rows.sum(0) if needs_bias else None, None, None


class _Embedding(torch.autograd.Function):
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
        if offered is None:
            whole: Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, x, ctx.num_rows, ctx.padding, False
            )
            return None, whole, None, None
        slot, is_begun = offered
        if not is_begun:
            slot.zero_()
        numbers, places = x.unique(return_inverse=True)
        # Summed on their own first: small ones would get lost in a large one, in bfloat16.
        total = torch.promote_types(slot.dtype, torch.float32)
        sums = gradient.new_zeros(len(numbers), slot.shape[1], dtype=total)
        sums.index_add_(0, places.flatten(), gradient.reshape(-1, slot.shape[1]).to(total))
        sums[numbers == ctx.padding] = 0
        slot.index_add_(0, numbers, sums.to(slot.dtype))
        return None, None if is_begun else slot, None, None


def _offer_of(weight: Tensor) -> SlotOffer | None:
    if torch.compiler.is_compiling():
        return None
    offer: SlotOffer | None = weight.__dict__.get(_OFFER)
    return offer


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(x) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled(x.device.type)
        and not _private.is_transformed_by_functorch()
    )


def _is_wanted(node: Any) -> bool:
    """Whether this backward reaches ``node``; one to some tensors only, of a pipeline, may not."""
    try:
        return _private.will_execute(node)
    except RuntimeError:  # so says torch in `torch.autograd.grad`, which returns what comes there
        return True


def _goes_to_grad(node: Any) -> bool:
    """Whether autograd will hand a gradient to ``node``, an AccumulateGrad, and to nothing else."""
    weight = getattr(node, "variable", None)
    if torch.is_grad_enabled() or weight is None or _private.gradient_hooks(weight):
        return False
    try:
        return _private.will_execute(node)
    except RuntimeError:  # so says torch in `torch.autograd.grad`, which returns it
        return False
