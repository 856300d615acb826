"""Replicas of `shardwise train` that synchronize at a hub: killed or stopped ones rejoin."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.outer import frames
from shardwise.outer.members import Role
from shardwise.outer.serving import HubThread

from .commands import Command, Finished, environment


class EndTogether:
    """A callback that ends the run after the step in the file next to its directory."""

    def __init__(self, _: object, directory: Path) -> None:
        self._file = directory.parent / "last-step"

    def __call__(self, trainer: Any, record: Any) -> None:
        time.sleep(0.01)  # leaves CPU time to processes that start
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
    for steps in (own, others):  # a late replica takes over the other's number of steps
        assert steps == sorted(set(steps))
        assert steps[-1] >= last


def _end(tmp_path: Path, *commands: Command) -> list[Finished]:
    """End the replicas 40 steps later."""
    last = max(_steps(path)[-1] for path in tmp_path.iterdir() if _steps(path)) + 40
    (tmp_path / "last-step.new").write_text(str(last))
    (tmp_path / "last-step.new").rename(tmp_path / "last-step")
    finished = [command.finish() for command in commands]
    assert [one.code for one in finished] == [0 for _ in finished], finished
    return finished


def _start_hub(address: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        words = [sys.executable, "-m", "shardwise.outer", address]
        return subprocess.Popen(words, stderr=file, env=environment())


@pytest.mark.thorough
def test_replicas_train_on_alone_while_the_hub_is_gone(tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    hub = _start_hub(address, tmp_path / "hub.log")
    try:
        pair = [_start(tiny, address, n, place) for n, place in ((0, first), (1, second))]
        for command, place in zip(pair, (first, second), strict=True):
            command.wait_for(lambda place=place: len(_steps(place)) > 10)  # type: ignore[misc]
        hub.kill()
        hub.wait()
        for command, place in zip(pair, (first, second), strict=True):
            later = _steps(place)[-1] + 12  # more than a round
            command.wait_for(lambda place=place, later=later: _steps(place)[-1] > later)  # type: ignore[misc]
        hub = _start_hub(address, again := tmp_path / "hub-again.log")
        for number, command in enumerate(pair):
            name = f"replica {number} is connected"
            command.wait_for(lambda name=name: name in again.read_text())  # type: ignore[misc]
        ends = _end(tmp_path, *pair)
    finally:
        hub.kill()
        hub.wait()
    for number, end in enumerate(ends):
        assert f"replica {number}, rank 0 lost the hub at {address}" in end.stderr
        assert "it trains on alone until the hub is back" in end.stderr
        assert f"replica {number}, rank 0 reached the hub at {address}" in end.stderr


@pytest.mark.thorough
def test_a_replica_that_is_stopped_for_long_comes_back_with_the_state_of_the_other(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SILENT_SECONDS", 5.0)
    first, second = tmp_path / "first", tmp_path / "second"
    with HubThread() as hub:
        replicas = hub.hub.replicas
        stayed, stopped = (
            _start(tiny, hub.address, n, place) for n, place in ((0, first), (1, second))
        )
        for command, place in ((stayed, first), (stopped, second)):
            command.wait_for(lambda place=place: len(_steps(place)) > 10)  # type: ignore[misc]
        os.killpg(stopped.pid, signal.SIGSTOP)
        try:
            stayed.wait_for(lambda: 1 not in replicas)
            later = _steps(first)[-1] + 12
            stayed.wait_for(lambda: _steps(first)[-1] > later)
        finally:
            os.killpg(stopped.pid, signal.SIGCONT)
        stopped.wait_for(lambda: getattr(replicas.get(1), "role", None) is Role.MEMBER)
        stopped.wait_for(lambda: _steps(second)[-1] > later)
        ends = _end(tmp_path, stayed, stopped)
    assert "went on without replica 1, which is gone" in ends[0].stderr
    assert "replica 1, rank 0 lost the hub at" in ends[1].stderr
    assert "replica 1, rank 0 took the state of another replica, after step" in ends[1].stderr
    steps = _steps(second)
    assert steps == sorted(set(steps))
