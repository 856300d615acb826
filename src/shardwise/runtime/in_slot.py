"""Weight gradients computed where they are reduced from: nothing is allocated, nothing copied.

The weight of an `nn.Linear` gets its gradient from one product of matrices, and that can write to
any memory. So `fully_shard` gives linear layers (unless their class has a forward of its own) a
forward whose backward writes into the weight's slot of the reduce buffer. Autograd takes what
backward returns for ``.grad`` without copying it. Wherever that could be wrong, the gradient comes
as always and is copied into the slot: a second use of the weight, a hook on it, gradients that go
to `torch.autograd.grad`, autocast, other dtypes, functorch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrize

__all__ = ["SlotLinear", "let_compute_in_slot", "offer_slot"]

_OFFER = "_shardwise_slot"
_LEAST_ELEMENTS = 1 << 16  # a Python function costs autograd more than copying fewer does

SlotOffer = Callable[[], Tensor | None]


def let_compute_in_slot(module: nn.Module) -> None:
    """Have a linear layer compute its weight's gradient in its slot, if the weight offers one."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or parametrize.is_parametrized(module):
        return
    # A class that has a word in what derives from it, such as a registry, is left alone.
    is_plain = type(kind) is type and not hasattr(kind.__init_subclass__, "__func__")
    if is_plain and kind.forward is nn.Linear.forward and kind.__call__ is nn.Linear.__call__:
        module.__class__ = _slot_class(kind)  # type: ignore[arg-type]


def offer_slot(weight: nn.Parameter, offer: SlotOffer) -> None:
    """Have ``offer`` asked in backward for memory like ``weight``; None: there is none now."""
    if weight.numel() >= _LEAST_ELEMENTS:
        weight.__dict__[_OFFER] = offer


class SlotLinear(nn.Linear):
    """A linear layer of a sharded model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Linear)
        weight: Tensor = self.weight
        offer = weight.__dict__.get(_OFFER)
        if offer is None or not _is_plain(input, weight):
            return super().forward(input)
        output: Tensor = _Linear.apply(input, weight, self.bias, offer)  # type: ignore[no-untyped-call]
        return output


@cache
def _slot_class(kind: type[nn.Linear]) -> type[SlotLinear]:
    if kind is nn.Linear:
        return SlotLinear
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (SlotLinear, kind), names)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offer: SlotOffer
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offer = offer
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [..., outputs]
        x, weight = ctx.saved_tensors  # [..., inputs], [outputs, inputs]
        rows = gradient.reshape(-1, weight.shape[0])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_weight = None
        if needs_weight:
            slot = ctx.offer() if _goes_to_grad(ctx.next_functions[1][0], weight) else None
            inputs = x.reshape(-1, weight.shape[1])
            of_weight = (
                torch.mm(rows.t(), inputs, out=slot) if slot is not None else rows.t() @ inputs
            )
        of_x = gradient @ weight if needs_x else None
        return of_x, of_weight, rows.sum(0) if needs_bias else None, None


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()  # no public name
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
    )


def _goes_to_grad(node: Any, weight: Tensor) -> bool:
    """Whether autograd will hand the gradient of ``weight`` to AccumulateGrad, and nobody else."""
    if torch.is_grad_enabled() or weight._backward_hooks or getattr(node, "variable", None) is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # so says torch in `torch.autograd.grad`, which returns it
        return False
