"""Starting ``shardwise`` as a user would, or in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TypeVar, TypeVarTuple, cast

import pytest
import torch
import torch.distributed as dist

from shardwise.cli import main
from shardwise.launch.world import World
from tests.ranks import run_on

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")

# Prefixes of the environment variables of launchers.
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


def environment(**changes: str) -> dict[str, str]:
    """This one, without what a launcher may have left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | changes


def start(arguments: Sequence[str | Path], cwd: Path, **changes: str) -> subprocess.Popen[str]:
    """Start ``shardwise`` with these arguments, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", *map(str, arguments)],
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> Finished:
    stdout, stderr = process.communicate(timeout=280)
    return Finished(process.returncode, stdout, stderr)


def run(arguments: Sequence[str | Path], cwd: Path, **changes: str) -> Finished:
    """Run ``shardwise`` with these arguments to its end."""
    return finish(start(arguments, cwd, **changes))


def run_on_pool(
    num_ranks: int, function: Callable[[World, *Arguments], T], *args: *Arguments
) -> list[T]:
    """`run_on_local_ranks` without new processes; what the ranks print is printed here."""
    outcomes = run_on(num_ranks, _run_captured, function, args, deadline=120.0)
    for printed, _ in outcomes:
        sys.stdout.write(printed)
    return [cast("T", result) for _, result in outcomes]


def _run_captured(function: Callable[..., object], args: tuple[object, ...]) -> tuple[str, object]:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with redirect_stdout(StringIO()) as printed:
        result = function(world, *args)
    return printed.getvalue(), result


def fail(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that a bad command line gets, in this process."""
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("shardwise: ")
    return line


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]
