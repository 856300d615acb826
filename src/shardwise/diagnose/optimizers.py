"""The optimizers that `shardwise verify` knows by name.

One process and several ranks round differently, so ``eps`` is large: with a small ``eps``, a
gradient that is pure rounding error would become a step. Parameters with two or more dims are
matrices.
"""

from collections.abc import Callable, Iterator, Mapping
from math import gcd, prod
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwise.optim import SOAP, Adam8bit, Muon

__all__ = ["OPTIMIZERS", "OptimizerFn", "adamw"]

OptimizerFn = Callable[[Iterator[nn.Parameter]], Optimizer]
EPS = 1e-3


def adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-2, eps=EPS)


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def muon(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return Muon(_matrices(parameters), eps=EPS, adamw_eps=EPS)


def soap(parameters: Iterator[nn.Parameter]) -> Optimizer:
    options: dict[str, Any] = {"damping": EPS, "precondition_frequency": 2}
    return SOAP(_matrices(parameters), eps=EPS, adamw_eps=EPS, **options)


def adam8bit(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """Use blocks that divide rows, because one process does not start a new block in each row."""
    all_parameters = list(parameters)
    quantized = [p for p in all_parameters if p.ndim > 1 and _row(p) % 2 == 0]
    others = [p for p in all_parameters if p.ndim <= 1 or _row(p) % 2]
    groups = _groups(quantized, others, state_bits=32)
    block = gcd(*map(_row, quantized)) or 2
    return Adam8bit(groups, lr=1e-2, eps=EPS, block=block, min_elements=1)


def _matrices(parameters: Iterator[nn.Parameter]) -> list[dict[str, Any]]:
    all_parameters = list(parameters)
    matrices = [p for p in all_parameters if p.ndim > 1]
    others = [p for p in all_parameters if p.ndim <= 1]
    return _groups(matrices, others, method="adamw")


def _groups(
    parameters: list[nn.Parameter], others: list[nn.Parameter], **options: Any
) -> list[dict[str, Any]]:
    groups = [{"params": parameters}, {"params": others, **options}]
    return [group for group in groups if group["params"]]


def _row(parameter: nn.Parameter) -> int:
    """Return the number of elements in a row."""
    return prod(parameter.shape[1:])


OPTIMIZERS: Mapping[str, OptimizerFn] = {
    "adamw": adamw,
    "sgd": sgd,
    "muon": muon,
    "soap": soap,
    "adam8bit": adam8bit,
}
