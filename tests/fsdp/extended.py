"""Classes of parameters with FSDP2's all-gather extensions."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

__all__ = ["InBfloat16", "Pair", "Wrapper", "replace_weights"]


class Wrapper(Tensor):
    """A tensor that wraps tensors of the same shape; operations run on each of them."""

    wrapped: tuple[str, ...] = ("data_",)

    @staticmethod
    def __new__(cls: Any, *tensors: Tensor) -> Any:
        first = tensors[0]
        return torch.Tensor._make_wrapper_subclass(
            cls,
            first.size(),
            strides=first.stride(),
            dtype=first.dtype,
            device=first.device,
            requires_grad=first.requires_grad,
        )

    def __init__(self, *tensors: Tensor) -> None:
        for name, tensor in zip(self.wrapped, tensors, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[Sequence[str], None]:
        return list(self.wrapped), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_metadata: Any) -> Any:
        return cls(*(inner[name] for name in cls.wrapped))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        results = []
        for name in cls.wrapped:
            unwrapped = pytree.tree_map_only(cls, attrgetter(name), (args, kwargs or {}))
            results.append(func(*unwrapped[0], **unwrapped[1]))
        if func._schema.is_mutable:
            return args[0] if results[0] is not None else None
        wrap: Callable[..., Any] = lambda *t: cls(*t) if isinstance(t[0], Tensor) else t[0]  # noqa: E731
        return pytree.tree_map(wrap, *results)


class Pair(Wrapper):
    """Two tensors that are gathered unchanged and make up the gathered parameter."""

    wrapped = ("a", "b")

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.a, self.b), None  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, gathered: Any, _metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, b = gathered
        if out is None:
            return Pair(a, b).to(dtype), (a, b)
        if a.dtype == dtype:
            assert a.data_ptr() == out.a.data_ptr()
        else:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


class InBfloat16(Wrapper):
    """A tensor that is gathered in bfloat16 and computes in its own dtype."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, _stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert isinstance(module, nn.Linear)
        assert (mesh.ndim, policy.output_dtype) == (1, None)
        shape = (-(-outer_size[0] // mesh.size()), *outer_size[1:])
        padded = self.data_.new_zeros(shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        padded[: self.shape[0]].copy_(self.data_)  # type: ignore[attr-defined]
        return (padded,), "metadata"

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        if out is not None:
            if dtype != torch.bfloat16:
                with torch.no_grad(), _unsafe_preserve_version_counter(out):
                    out.copy_(gathered[0][: len(out)])
            return None
        whole = gathered[0].to(dtype)
        return whole, (gathered[0], whole)


def replace_weights(
    model: nn.Module, make: Callable[[Tensor], Tensor], *, uneven: bool = True
) -> None:
    """Apply ``make`` to the weights of linear layers; without ``uneven``, of even sizes only."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and (uneven or module.out_features % 2 == 0):
            weight = module.weight
            module.weight = nn.Parameter(make(weight.detach()), weight.requires_grad)
