"""GRPO with generation in the same processes and in another one: losses and rewards of DDP.

trl is not a dependency of the tests: ``pip install trl`` to run all of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

STEPS = 20


def run(out: Path, *options: str) -> list[dict[str, Any]]:
    torchrun(2, "examples/rl/grpo.py", str(out), *options)
    (file,) = out.glob("*.json")
    found: list[dict[str, Any]] = json.loads(file.read_text())
    assert len(found) == STEPS
    return found


def test_a_plain_loop_generates_here_and_there(tmp_path: Path) -> None:
    expected = run(tmp_path / "ddp", "--engine", "ddp")
    assert expected[-1]["reward"] > expected[0]["reward"] + 0.1, "it learns"
    here = run(tmp_path / "here")
    there = run(tmp_path / "there", "--generate", "there")
    for found in (here, there):
        for step, wanted in zip(found, expected, strict=True):
            assert step["reward"] == pytest.approx(wanted["reward"], abs=1e-6)
            assert step["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
            assert step["norm"] == pytest.approx(wanted["norm"], rel=1e-4, abs=1e-5)


def test_little_is_sent_at_the_learning_rates_of_reinforcement_learning(tmp_path: Path) -> None:
    options = ["--generate", "there", "--dtype", "bfloat16", "--lr", "1e-6"]
    whole, *sent = (step["sent"] for step in run(tmp_path / "run", *options))
    assert sum(sent) / len(sent) < 0.15 * whole
    assert min(sent) > 0


def test_trls_trainer_has_the_losses_and_rewards_of_ddp(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    logs = []
    for engine in ("ddp", "shardwise"):
        torchrun(2, "examples/rl/grpo_trl.py", str(tmp_path), "--engine", engine)
        lines = json.loads((tmp_path / f"{engine}.json").read_text())
        logs.append([line for line in lines if "loss" in line])
    expected, found = logs
    assert len(found) == len(expected) == STEPS
    assert expected[-1]["reward"] > expected[0]["reward"] + 0.1, "it learns"
    for step, wanted in zip(found, expected, strict=True):
        assert step["reward"] == pytest.approx(wanted["reward"], abs=1e-6)
        assert step["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
