"""Tests `sw.fit` under a memory limit that the kernel enforces, if this process may set one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forecast.limited_run import MODELS

_ALL = Path("/sys/fs/cgroup")
_V1 = _ALL / "memory"  # v2 has all controllers in one folder


@contextmanager
def limited(num_bytes: int) -> Iterator[list[str]]:
    """Yield the folder of a cgroup with a memory limit, or nothing if it cannot be created."""
    group = (_V1 if _V1.is_dir() else _ALL) / f"shardwise-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield []
        return
    try:
        name = "memory.limit_in_bytes" if _V1.is_dir() else "memory.max"
        (group / name).write_text(str(num_bytes), encoding="ascii")
        yield [str(group)]
    finally:
        group.rmdir()


def train(model: str, group: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.forecast.limited_run", model, *group]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_a_run_survives_within_its_budget_and_is_killed_below_its_need(model: str) -> None:
    _, budget = MODELS[model]
    with limited(int(1.03 * budget)) as group:
        done = train(model, group)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown <= budget
    with limited(int(0.9 * min(grown, budget))) as group:
        if group:
            killed = train(model, group)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
