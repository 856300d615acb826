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
"""

import weakref
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise import _private
from shardwise.features.slot_functions import (
    EmbeddingFunction,
    LinearFunction,
    Saved,
    number_of,
    offer_slot,
)
from shardwise.runtime.engine import Runtime
from shardwise.runtime.unit import FlatParameters, Unit

__all__ = ["InPlaceGradEmbedding", "InPlaceGradLinear", "offer_slots", "replace_layers"]

_LEAST_ELEMENTS = 1 << 16  # below this, a Python autograd Function costs more than the copy


def replace_layers(root: nn.Module) -> None:
    """Make the linear and embedding layers of ``root`` compute weight gradients in their slots."""
    modules: Any = root.modules()
    layers: Any = ((nn.Linear, InPlaceGradLinear), (nn.Embedding, InPlaceGradEmbedding))
    for module, (plain, in_slot) in product(modules, layers):
        kind: Any = type(module)
        if isinstance(module, plain) and not parametrize.is_parametrized(module):
            # Leave a class alone if subclassing it has side effects, such as a registration.
            is_plain = type(kind) is type and not hasattr(kind.__init_subclass__, "__func__")
            if is_plain and kind.forward is plain.forward and kind.__call__ is plain.__call__:
                module.__class__ = _slot_class(kind, plain, in_slot)


def offer_slots(runtime: Runtime) -> None:
    """Let backward claim the slots of the parameters of ``runtime`` in the reduce buffers."""
    for unit in runtime.units:
        for flat in unit.flats:
            for position, parameter in enumerate(flat.parameters):
                if parameter.dense.numel() >= _LEAST_ELEMENTS:
                    claim = partial(_claim_slot, weakref.ref(unit), weakref.ref(flat), position)
                    offer_slot(parameter.dense, claim)


def _claim_slot(
    unit_ref: weakref.ref[Unit], flat_ref: weakref.ref[FlatParameters], position: int
) -> tuple[Tensor, bool] | None:
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None:
        return None
    in_slot = all(map(_computes_in_slot, flat.parameters[position].modules))
    return unit.claim_gradient(flat, position, in_slot=in_slot)


def _computes_in_slot(module: nn.Module | None) -> bool:
    """Whether ``module`` computes the gradient of its weight in a slot."""
    if isinstance(module, InPlaceGradEmbedding):
        return module.is_plain
    return isinstance(module, InPlaceGradLinear)


class InPlaceGradLinear(nn.Linear):
    """A linear layer that computes its weight gradient in the reduce buffer."""

    def _get_name(self) -> str:
        return nn.Linear.__name__ if type(self) is InPlaceGradLinear else type(self).__name__

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Linear)
        weight, number = self.weight, number_of(self.weight)
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
        return nn.Embedding.__name__ if type(self) is InPlaceGradEmbedding else type(self).__name__

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in nn.Embedding)
        weight, number = self.weight, number_of(self.weight)
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
