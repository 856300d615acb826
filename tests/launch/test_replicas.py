"""Replicas that `run_replicas` starts, and those that come too late."""

import time
from pathlib import Path

import pytest

from shardwise.launch.replicas import run_replicas

pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 only")

METRICS = "metrics.jsonl"


def train(words: list[str]) -> int:
    """The first replica trains; the second one is still starting when that has ended."""
    directory = Path(words[-1].removeprefix("run.directory="))
    directory.mkdir(parents=True, exist_ok=True)
    if directory.name == "0":
        (directory / METRICS).touch()
        return 0
    time.sleep(20)
    (directory / METRICS).touch()
    return 0


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "resumed"])
def test_a_replica_that_has_not_joined_when_another_one_ends_does_not_train_alone(
    is_known: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "1" / METRICS
    if is_known:  # of an earlier run, which it would resume
        metrics.parent.mkdir()
        metrics.touch()
    run_replicas(train, ["train"], 2, 1, str(tmp_path))
    assert metrics.exists() is is_known
    assert (tmp_path / "0" / METRICS).exists()
    expected = "replica 1 is stopped: it had trained no step when another one ended"
    assert expected in capfd.readouterr().err
