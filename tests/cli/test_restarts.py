"""Runs that are killed or interrupted, and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.checkpoint.directory import latest
from shardwise.cli import main

from .commands import PATIENCE_SECONDS, Command, environment, fail, losses, own_lines, run

SETTINGS = ("train.steps=60", "checkpoint.every=5", "sample.bytes=0")


def settings(directory: Path, *more: str) -> list[str]:
    chosen = (f"run.directory={directory}", *SETTINGS, *more)
    return [word for setting in chosen for word in ("--set", setting)]


@pytest.mark.thorough  # the next test uses torchrun's launcher in this process
def test_a_rank_killed_under_torchrun_is_restarted(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--max-restarts=1", "-m", "shardwise", "train", str(tiny)]
    process = subprocess.Popen(
        [sys.executable, *command, *settings(directory, "run.overwrite=true")],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + PATIENCE_SECONDS
    while latest(directory / "checkpoints") is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no checkpoint"
        time.sleep(0.02)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, stderr
    _assert_resumed(stdout, directory)


@pytest.mark.thorough  # torchrun waits 30 s for the ranks that are left
def test_a_killed_rank_is_restarted(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    chosen = settings(directory, "run.overwrite=true")
    command = RestartedCommand(["train", tiny, *chosen], tmp_path)
    command.wait_for(lambda: latest(directory / "checkpoints") is not None)
    os.kill(max(child.pid for child in psutil.Process(command.pid).children()), signal.SIGKILL)
    finished = command.finish()
    assert finished.code == 0, finished.stderr
    _assert_resumed(finished.stdout, directory)


def launch_with_restart(arguments: Sequence[str] | None = None) -> int:
    """Run the command on two ranks as torchrun does: all start again if one dies."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    codes: dict[int, int] = elastic_launch(config, main)(arguments)
    return max(codes.values())


class RestartedCommand(Command):
    main = staticmethod(launch_with_restart)


def _assert_resumed(printed: str, directory: Path) -> None:
    assert re.search(r"resuming after step \d*[05]: ", printed)
    assert len(losses(directory)) == 60, "a line is missing or repeated"
    assert (directory / "summary.json").exists()


def test_an_interrupt_saves_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    """tests/train/test_saver.py tests that all ranks stop after the same step."""
    directory = tmp_path / "a run"  # a shell would split this name
    chosen = settings(directory, "train.steps=100000", "shard.nproc=1")
    command = Command(["train", tiny, *chosen], tmp_path)
    command.wait_for(lambda: latest(directory / "checkpoints") is not None)
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does; the launcher repeats it
    finished = command.finish()
    assert finished.code == 130, finished.stderr
    newest = latest(directory / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{len(losses(directory)):08}"
    assert "stopped" not in finished.stdout
    assert own_lines(finished.stderr) == [
        f"shardwise: interrupted; saved {newest}; to resume:",
        f"shardwise train '{directory}/config.toml'",
    ]


@pytest.mark.parametrize("to_a_rank", [False, True])
def test_the_signal_of_a_scheduler_saves_a_checkpoint(
    tiny: Path, tmp_path: Path, to_a_rank: bool
) -> None:
    """The command gets it, and not the ranks that it has started; or only one of them."""
    directory = tmp_path / "run"
    chosen = settings(directory, "train.steps=100000", "checkpoint.every=100000", "shard.nproc=2")
    command = Command(["train", tiny, *chosen], tmp_path)
    metrics = directory / "metrics.jsonl"
    command.wait_for(lambda: metrics.exists() and bool(metrics.read_bytes()))
    ranks = [child.pid for child in psutil.Process(command.pid).children()]
    os.kill(max(ranks) if to_a_rank else command.pid, signal.SIGUSR1)
    finished = command.finish()
    assert finished.code == 128 + signal.SIGUSR1, finished.stderr
    newest = latest(directory / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{len(losses(directory)):08}"
    assert f"shardwise: stopped; saved {newest}; to resume:" in finished.stderr


def test_after_the_death_of_a_rank_the_command_says_how_to_resume(
    tiny: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    chosen = settings(directory, "train.steps=100000", "shard.nproc=2")
    command = Command(["train", tiny, *chosen], tmp_path)
    command.wait_for(lambda: latest(directory / "checkpoints") is not None)
    os.kill(max(child.pid for child in psutil.Process(command.pid).children()), signal.SIGKILL)
    finished = command.finish()
    assert finished.code == 1, finished.stderr
    newest = latest(directory / "checkpoints")
    assert "Traceback" in finished.stderr or "was killed by SIGKILL" in finished.stderr
    assert finished.stderr.endswith(
        f"saved {newest}; to resume:\nshardwise train {directory}/config.toml\n"
    )


@pytest.mark.thorough
def test_a_soak_of_a_few_kills() -> None:
    command = [sys.executable, "-m", "tests.soak", "--kills", "2", "--steps", "8"]
    root = Path(__file__).parents[2]
    soak = subprocess.run(
        command, cwd=root, env=environment(), capture_output=True, text=True, check=False
    )
    assert soak.returncode == 0, soak.stderr
    assert soak.stdout.startswith("2 kills of "), soak.stdout


def ranks_of(launcher: int) -> list[int]:
    """Return the ids of the ranks that ``launcher`` started, found by their command lines."""
    children = psutil.Process(launcher).children()
    return sorted(child.pid for child in children if "shardwise" in child.cmdline())


def test_a_second_job_in_a_run_directory_ends_at_once(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first one is not disturbed; after it was killed, nothing blocks the next one."""
    directory = tmp_path / "run"
    chosen = settings(directory, "shard.nproc=1")
    command = Command(["train", tiny, *chosen, "--set", "train.steps=100000"], tmp_path)
    command.wait_for(lambda: latest(directory / "checkpoints") is not None)
    written = (directory / "config.toml").stat().st_ino
    for more in ([], ["--set", "run.overwrite=true"]):
        error = fail(capfd, ["train", str(tiny), *chosen, *more])
        assert f"{directory} is in use by process {command.pid} on " in error
    count = len(losses(directory))
    command.wait_for(lambda: len(losses(directory)) > count)
    assert (directory / "config.toml").stat().st_ino == written
    command.finish(kill=True)
    steps = f"train.steps={len(losses(directory)) + 10}"
    finished = run(["train", tiny, *chosen, "--set", steps], tmp_path)
    assert finished.code == 0, finished.stderr
    assert "resuming after step" in finished.stdout
    records = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
