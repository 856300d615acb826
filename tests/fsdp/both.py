"""Runs a program with PyTorch's FSDP and with ours, on the same ranks, and compares the results."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.covering import cover

TOLERANCE = 1e-10
DEADLINE = 90.0  # seconds; the first use of FSDP2 imports a compiler

# A program takes the module that it imports from, and returns the results to compare.
Program = Callable[..., Any]
Case = tuple[Program, dict[str, Any]]  # a program and its other arguments


def cases(program: Program, **values: Sequence[Any]) -> list[Any]:
    """``program`` with each combination of the values of its options, as parameters of a test.

    `make test` runs rows in which each value occurs, `make thorough` the others.
    """
    rows = list(product(*values.values()))
    chosen = cover(rows, strength=1) or rows  # one without options
    return [
        pytest.param(
            (program, dict(zip(values, row, strict=True))),
            marks=() if row in chosen else pytest.mark.thorough,
        )
        for row in rows
    ]


def one_of(program: Program, **values: Sequence[Any]) -> list[Any]:
    """Like `cases`, if other programs cover each value: `make test` runs the first row only."""
    first, *others = cases(program, **values)
    return [first, *thorough(others)]


def thorough(parameters: Iterable[Any]) -> list[Any]:
    """Mark all ``parameters`` for `make thorough` only."""
    return [pytest.param(*each.values, marks=pytest.mark.thorough) for each in parameters]


def name_of(case: Case) -> str:
    """The id of a test of a program."""
    return f"{case[0].__name__}-{'-'.join(map(str, case[1].values()))}"


def run_both(
    program: Program,
    options: Mapping[str, Any],
    tolerance: float = TOLERANCE,
    ours: str = "shardwise.fsdp",
) -> None:
    """Assert that the program gives the same results with PyTorch's FSDP and with ours.

    ``tolerance`` is relative to the largest element of a tensor. ``ours`` is the module that the
    program imports from.
    """
    results = []
    for name in ("torch.distributed.fsdp", ours):
        torch.manual_seed(0)
        dist.barrier()
        results.append(program(importlib.import_module(name), **options))
    assert_same(results[1], results[0], "result", tolerance)


def run_ours(program: Program, options: Mapping[str, Any]) -> None:
    """Run a program that contains its own assertions."""
    program(importlib.import_module("shardwise.fsdp"), **options)


def assert_same(ours: Any, theirs: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Assert that both have the same structure and the same numbers."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), f"{what}: {type(ours)}"
        assert type(ours) is type(theirs) or not theirs.requires_grad, f"{what}: {type(ours)}"
        assert ours.shape == theirs.shape, f"{what}: {ours.shape}, expected {theirs.shape}"
        assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}, expected {theirs.dtype}"
        if theirs.numel():
            error = (ours - theirs).abs().amax() / theirs.abs().amax().clamp_min(1e-30)
            assert float(error) <= tolerance, f"{what}: {float(error):.2e}"
        return
    if isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), f"{what}: {list(ours)}, expected {list(theirs)}"
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{what}[{key!r}]", tolerance)
        return
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{what}: {ours}, expected {theirs}"
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{what}[{i}]", tolerance)
        return
    if isinstance(theirs, float):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"{what}: {ours}, expected {theirs}"
        return
    assert ours == theirs, f"{what}: {ours!r}, expected {theirs!r}"
