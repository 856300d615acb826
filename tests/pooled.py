"""Local ranks of a command, without new processes."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist

from shardwise.launch.world import World
from tests.ranks import run_on

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def run_on_pool(
    num_ranks: int, function: Callable[[World, *Arguments], T], *args: *Arguments
) -> list[T]:
    """`run_on_local_ranks` without new processes; what the ranks print is printed here."""
    outcomes = run_on(num_ranks, _run_captured, function, args)
    for printed, _ in outcomes:
        sys.stdout.write(printed)
    return [cast("T", result) for _, result in outcomes]


def _run_captured(function: Callable[..., object], args: tuple[object, ...]) -> tuple[str, object]:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with redirect_stdout(StringIO()) as printed:
        result = function(world, *args)
    return printed.getvalue(), result
