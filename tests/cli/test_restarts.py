"""Runs that are killed or interrupted, and resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardwise.checkpoint.directory import latest

from .commands import environment, finish, losses, start

SETTINGS = ("train.steps=60", "checkpoint.every=5", "sample.bytes=0")


def settings(directory: Path, *more: str) -> list[str]:
    chosen = (f"run.directory={directory}", *SETTINGS, *more)
    return [word for setting in chosen for word in ("--set", setting)]


def test_a_rank_killed_under_torchrun_is_restarted(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--max-restarts=1", "-m", "shardwise.cli", "train", str(tiny)]
    process = subprocess.Popen(
        [sys.executable, *command, *settings(directory, "run.overwrite=true")],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(process, lambda: latest(directory / "checkpoints") is not None)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    finished = finish(process)
    assert finished.code == 0, finished.stderr
    assert re.search(r"resuming after step \d*[05]: ", finished.stdout)
    assert len(losses(directory)) == 60, "a line is missing or repeated"
    assert (directory / "summary.json").exists()


def test_an_interrupt_saves_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments: list[str | Path] = ["train", tiny, *settings(directory, "train.steps=100000")]
    process = start(arguments, tmp_path)
    wait_for(process, lambda: latest(directory / "checkpoints") is not None)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; the launcher repeats it
    finished = finish(process)
    assert finished.code == 130, finished.stderr
    [step] = re.findall(r"stopped by SIGINT after step (\d+) of 100000", finished.stdout)
    assert finished.stderr.splitlines()[-1].startswith("shardwise: interrupted; ")
    newest = latest(directory / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{int(step):08}"
    assert len(losses(directory)) == int(step)


def test_a_soak_of_a_few_kills() -> None:
    command = [sys.executable, "-m", "tests.soak", "--kills", "3", "--steps", "12"]
    root = Path(__file__).parents[2]
    soak = subprocess.run(
        command, cwd=root, env=environment(), capture_output=True, text=True, check=False
    )
    assert soak.returncode == 0, soak.stderr
    assert soak.stdout.startswith("3 kills of "), soak.stdout


def wait_for(process: "subprocess.Popen[str]", ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 250
    while time.monotonic() < end and process.poll() is None:
        if ready():
            return
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)  # torchrun's workers are in groups of their own
    pytest.fail(f"the condition was not reached: {process.communicate()}")


def ranks_of(launcher: int) -> list[int]:
    """The ranks that ``launcher`` started, by their command lines."""
    children = psutil.Process(launcher).children()
    return sorted(child.pid for child in children if "shardwise.cli" in child.cmdline())
