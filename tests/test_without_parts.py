"""The core trains over Gloo in a copy of the package without hostccl and watch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.cli.commands import environment
from tests.forked import run_forked
from tests.ranks import run_on
from tests.without_parts import train_all

_ROOT = Path(__file__).parents[1]
_PARTS = ("hostccl", "watch")


def train(source: Path) -> dict[str, list[float]]:
    """Return the numbers that two ranks print with the package in ``source``."""
    finished = subprocess.run(
        [sys.executable, str(_ROOT / "tests/without_parts.py")],
        env={**environment(), "PYTHONPATH": str(source)},
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    numbers: dict[str, list[float]] = json.loads(finished.stdout)
    return numbers


def test_without_hostccl_and_watch_the_core_trains_over_gloo(tmp_path: Path) -> None:
    shutil.copytree(_ROOT / "src/shardwise", tmp_path / "shardwise")
    for part in _PARTS:
        shutil.rmtree(tmp_path / "shardwise" / part)
    expected, found = run_on(2, train_all)[0], train(tmp_path)
    assert len(expected) == 15
    for name, numbers in expected.items():
        # Gloo sums in another order.
        assert found[name] == pytest.approx(numbers, rel=1e-12), name
        assert numbers == pytest.approx(expected["ddp element"], rel=1e-10), name


def test_the_engine_registers_no_backend() -> None:
    """Once one is registered, torch calls groups of "cpu:gloo" "undefined"."""
    assert not run_forked(registers_backend)


def registers_backend() -> bool:
    import shardwise.parts  # noqa: F401, PLC0415

    assert callable(sw.fully_shard)
    return "hostccl" in dist.Backend.backend_list
