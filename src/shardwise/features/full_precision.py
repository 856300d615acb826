"""Modules that compute in full precision inside a model with `MixedPrecisionPolicy`."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.casting import cast_tensors
from shardwise.runtime.nested import tensors_in

__all__ = ["FullPrecision", "apply_precision"]


def apply_precision(
    root: nn.Module, policy: MixedPrecisionPolicy, settled: Collection[str] = ()
) -> None:
    """Cast the buffers of ``root``, and hook its modules that compute in full precision.

    Modules of the units ``settled``, which were sharded before, keep their own policy.
    """
    others = {id(module) for name in settled for module in root.get_submodule(name).modules()}
    for module in root.modules():
        if id(module) in others:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if policy.buffer_dtype is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(policy.buffer_dtype)
        if policy.full_precision and isinstance(module, policy.full_precision):
            FullPrecision(module)


class FullPrecision:
    """Hooks that cast a module's inputs to the dtype of its parameters, and its outputs back."""

    def __init__(self, module: nn.Module) -> None:
        self._input_dtypes: list[torch.dtype] = []  # of nested calls
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        floating = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        dtype = next((p.dtype for p in module.parameters(recurse=False)), torch.float32)
        self._input_dtypes.append(floating[0] if floating else dtype)
        args, kwargs = cast_tensors((args, kwargs), dtype)
        return args, kwargs

    def _leave(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return cast_tensors(output, self._input_dtypes.pop())
