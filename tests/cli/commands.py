"""Starting ``shardwise`` as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.cli import main

# What a launcher's environment variables begin with.
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
