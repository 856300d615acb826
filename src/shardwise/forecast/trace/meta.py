"""Copies of modules on the meta device, which allocate nothing."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

__all__ = ["on_meta"]


def on_meta(module: nn.Module, dtypes: Mapping[str, str] = MappingProxyType({})) -> nn.Module:
    """Copy ``module`` to the meta device, with new dtypes for the named parameters."""
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        dtype = getattr(torch, dtypes[name]) if name in dtypes else parameter.dtype
        meta = torch.empty_like(parameter, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)
