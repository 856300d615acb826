"""Replicas of `shardwise train` that meet at a hub, of which one is killed and started again."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.outer.serving import HubThread

from .commands import Command


class EndTogether:
    """A callback: the run ends after the step that a file next to its directory names."""

    def __init__(self, _: object, directory: Path) -> None:
        self._file = directory.parent / "last-step"

    def __call__(self, trainer: Any, record: Any) -> None:
        time.sleep(0.01)  # leaves the processor to whoever starts
        trainer.ends_early = self._file.exists() and record.step >= int(self._file.read_text())


def _start(tiny: Path, hub: str, replica: int, directory: Path) -> Command:
    settings = {
        "run.directory": directory,
        "run.callbacks": '["tests.cli.test_replicas:EndTogether"]',
        "train.steps": 100_000,
        "train.global_batch": 8,
        "checkpoint.every": 0,
        "sample.bytes": 0,
        "record.enabled": "false",
        "outer.hub": hub,
        "outer.replica": replica,
        "outer.replicas": 2,
        "outer.every": 4,
        "outer.fragments": 2,
        "outer.deadline": 120,
    }
    return _train(tiny, directory.parent, settings)


def _train(tiny: Path, cwd: Path, settings: dict[str, Any]) -> Command:
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return Command(["train", tiny, *sets], cwd)


def _steps(directory: Path) -> list[int]:
    path = directory / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.mark.thorough
def test_a_replica_that_is_killed_comes_back_with_the_state_of_the_other(
    tiny: Path, tmp_path: Path
) -> None:
    first, second, again = (tmp_path / name for name in ("first", "second", "again"))
    # Both begin with the checkpoint of a synchronous run.
    synchronous = {"run.directory": first, "train.steps": 6, "checkpoint.every": 6}
    finished = _train(tiny, tmp_path, synchronous | {"train.global_batch": 8}).finish()
    assert finished.code == 0, finished
    shutil.copytree(first, second)
    with HubThread() as hub:
        stayed, killed = (
            _start(tiny, hub.address, number, place) for number, place in ((0, first), (1, second))
        )
        killed.wait_for(lambda: len(_steps(second)) > 14)
        killed.finish(kill=True)
        alone_after = _steps(first)[-1]
        stayed.wait_for(lambda: _steps(first)[-1] > alone_after + 8)
        back = _start(tiny, hub.address, 1, again)
        back.wait_for(lambda: len(_steps(again)) > 8)
        last = _steps(first)[-1] + 100
        (tmp_path / "last-step.new").write_text(str(last))
        (tmp_path / "last-step.new").rename(tmp_path / "last-step")
        for command in (stayed, back):
            finished = command.finish()
            assert finished.code == 0, finished
        assert hub.hub.received_bytes.keys() == {0, 1}
    own, others = _steps(first), _steps(again)
    assert own[:alone_after] == list(range(1, alone_after + 1))  # no step was lost
    assert others[0] > alone_after + 8
    for steps in (own, others):  # one that is late takes the other's number of steps
        assert steps == sorted(set(steps))
        assert steps[-1] >= last
