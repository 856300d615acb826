"""The optimizers that `shardwise verify` knows by name: those of `plan.optimizers`.

One process and several ranks round differently, so ``eps`` is large: with a small ``eps``, a
gradient that is pure rounding error would become a step. Parameters with two or more dims are
matrices.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from math import gcd, prod
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.plan.optimizers import OPTIMIZERS, OptimizerSpec

__all__ = ["OptimizerFn", "adamw", "names", "optimizer_fn"]

OptimizerFn = Callable[[Iterator[nn.Parameter]], Optimizer]
EPS = 1e-3
_LR = 1e-2
# Options that make the steps of an optimizer comparable.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "sgd_momentum": {"lr": 0.1},
    "muon": {"lr": 1e-3, "adamw_eps": EPS},
    "soap": {"lr": 3e-3, "adamw_eps": EPS, "damping": EPS, "precondition_frequency": 2},
}


def names() -> Collection[str]:
    return [spec.name for spec in OPTIMIZERS.values() if spec.path]


def optimizer_fn(name: str) -> OptimizerFn:
    return partial(_build, OPTIMIZERS[name])


def _build(spec: OptimizerSpec, parameters: Iterator[nn.Parameter]) -> Optimizer:
    module, _, attribute = spec.path.partition(":")
    kind = getattr(import_module(module), attribute)
    options: dict[str, Any] = {"lr": _LR, **dict(spec.options), **_OPTIONS.get(spec.name, {})}
    if "eps" in signature(kind).parameters:
        options["eps"] = EPS
    found: Any = parameters
    if spec.kind == "matrices":
        found = _matrices(parameters)
    elif spec.kind == "blocks":
        found, block = _blocks(parameters)
        options |= {"block": block, "min_elements": 1}
    optimizer: Optimizer = kind(found, **options)
    return optimizer


adamw = optimizer_fn("adamw")


def _blocks(parameters: Iterator[nn.Parameter]) -> tuple[list[dict[str, Any]], int]:
    """Use blocks that divide rows, because one process does not start a new block in each row."""
    all_parameters = list(parameters)
    quantized = [p for p in all_parameters if p.ndim > 1 and _row(p) % 2 == 0]
    others = [p for p in all_parameters if p.ndim <= 1 or _row(p) % 2]
    return _groups(quantized, others, state_bits=32), gcd(*map(_row, quantized)) or 2


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
    return prod(parameter.shape[1:])
