"""`shardwise train --replicas`: a killed replica comes back while the other trains on."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .commands import Command

pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 only")


class EndTogether:
    """A callback that ends the run after the step in the file next to its directory."""

    def __init__(self, _: object, directory: Path) -> None:
        self._file = directory.parent / "last-step"

    def __call__(self, trainer: Any, record: Any) -> None:
        time.sleep(0.01)  # leaves CPU time to processes that start
        trainer.ends_early = self._file.exists() and record.step >= int(self._file.read_text())


def _records(directory: Path) -> list[dict[str, float]]:
    path = directory / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _steps(directory: Path) -> list[int]:
    return [int(record["step"]) for record in _records(directory)]


def _processes_of(command: Command) -> list[psutil.Process]:
    """The processes of the replicas, in the order of their start."""
    children = psutil.Process(command.pid).children()
    started = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    return sorted(started, key=lambda process: process.pid)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [0, 4])
def test_a_killed_replica_comes_back(tiny: Path, tmp_path: Path, every: int) -> None:
    settings = {
        "run.directory": tmp_path / "run",
        "run.callbacks": '["tests.cli.test_replicas:EndTogether"]',
        "train.steps": 100_000,
        "train.global_batch": 4,
        "checkpoint.every": 0,
        "sample.bytes": 0,
        "record.enabled": "false",
        "replicas.timeout": 30,
        "outer.every": every,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = Command(["train", tiny, *sets, "--replicas", "2", "--nproc", "1"], tmp_path)
    first, second, again = (tmp_path / "run" / name for name in ("0", "1", "1-1"))
    finished = None
    try:
        command.wait_for(lambda: bool(_steps(first)) and len(_steps(second)) > 8)
        killed = _processes_of(command)[1]
        for process in (killed, *killed.children(recursive=True)):
            process.kill()
        command.wait_for(lambda: len(_steps(again)) > 8)
        last = _steps(first)[-1] + 100
        (tmp_path / "last-step").write_text(str(last))
        (tmp_path / "last-step").rename(tmp_path / "run" / "last-step")
        finished = command.finish()
    finally:
        if finished is None:
            command.finish(kill=True)
    assert finished.code == 0, finished
    assert "replica 1 left" in finished.stderr, "while it happens"
    assert "it starts again in" in finished.stderr
    for text in ("replica 1 left", "replica 1 came back after", "; goodput "):
        assert text in finished.stdout, "in the report of the first replica"
    own, others = _steps(first), _steps(again)
    # The replica that has started last may take the state of the other one first.
    assert own == list(range(own[0], own[-1] + 1)), "the other replica trains every step"
    assert others[0] > _steps(second)[-1]
    assert own[-1] >= last
    if not every:  # gradients are averaged, so both have the same parameters
        norms = [{r["step"]: r["grad_norm"] for r in _records(path)} for path in (first, again)]
        assert all(norms[0][step] == norms[1][step] for step in others)
