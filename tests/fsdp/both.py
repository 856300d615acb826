"""Runs one program under torch's implementation and under ours, in the same ranks, and compares."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOLERANCE = 1e-10
DEADLINE = 90.0  # seconds; the first use of FSDP2 imports a compiler

# A program takes the namespace that it is to import from, and gives back what it saw.
Program = Callable[..., Any]


def state_dict_functions(f: Any) -> Any:
    """The module that a program which imports from ``f`` takes ``get_state_dict`` from."""
    is_torch = f.__name__ == "torch.distributed.fsdp"
    return importlib.import_module(
        "torch.distributed.checkpoint.state_dict" if is_torch else "shardwise.fsdp.state_dict"
    )


def name_of(case: tuple[Program, Mapping[str, Any]]) -> str:
    """Of a test that runs a program with options."""
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
    seen = []
    for name in ("torch.distributed.fsdp", ours):
        torch.manual_seed(0)
        dist.barrier()
        seen.append(program(importlib.import_module(name), **options))
    assert_alike(seen[1], seen[0], "result", tolerance)


def run_ours(program: Program, options: Mapping[str, Any]) -> None:
    """A program that asserts by itself."""
    program(importlib.import_module("shardwise.fsdp"), **options)


def assert_alike(ours: Any, theirs: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """The same structure, and the same numbers."""
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
            assert_alike(ours[key], value, f"{what}[{key!r}]", tolerance)
        return
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{what}: {ours}, expected {theirs}"
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{what}[{i}]", tolerance)
        return
    if isinstance(theirs, float):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"{what}: {ours}, expected {theirs}"
        return
    assert ours == theirs, f"{what}: {ours!r}, expected {theirs!r}"
