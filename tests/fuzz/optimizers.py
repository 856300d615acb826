"""The optimizers that are drawn."""

from typing import Any

import torch
from torch import nn

import shardwise as sw

__all__ = ["make_optimizer"]


def make_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    if kind in ("muon", "soap"):
        return _make_of_matrices(kind, parameters)
    if kind == "adam8bit":  # in blocks that are also those of small models
        return sw.optim.Adam8bit(parameters, lr=1e-2, eps=1e-3, block=8, min_elements=1)
    foreach, fused = kind.endswith("foreach"), kind.endswith("fused")
    # A large eps: where a gradient is all rounding, Adam would make a step of it.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=foreach, fused=fused)


def _make_of_matrices(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "method": "adamw"},
    ]
    if kind == "muon":  # with a large eps: it would enlarge what is all rounding
        return sw.optim.Muon(groups, lr=1e-2, eps=0.1, adamw_eps=1e-3, ns_dtype=torch.float64)
    damped: dict[str, Any] = {"precondition_frequency": 2, "damping": 1e-2}
    return sw.optim.SOAP(groups, lr=1e-3, eps=0.1, adamw_eps=1e-3, **damped)
