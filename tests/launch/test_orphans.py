"""Ranks end when their launcher is killed, also while they start."""

import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import psutil
import pytest

from shardwise.launch import local
from shardwise.launch.environment import RankEnv
from shardwise.launch.local import end_with_launcher, run_on_local_ranks
from shardwise.launch.world import World, join_world
from tests.cli.commands import forking_launcher
from tests.forked import start_forked
from tests.waiting import eventually

MOMENTS = ("before", "while they join", "in the function")


@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_end_with_a_launcher_that_is_killed(moment: str, tmp_path: Path) -> None:
    launcher = start_forked(_launch, moment, tmp_path)
    assert launcher.pid is not None
    assert eventually(lambda: len(list(tmp_path.glob("rank *"))) == 2)
    ranks = [int(file.read_text()) for file in tmp_path.glob("rank *")]
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.join()
    (tmp_path / "killed").touch()
    assert eventually(lambda: not any(map(_is_running, ranks)))


def _launch(moment: str, folder: Path) -> None:
    """Start ranks that write down their process ids, and that never end by themselves."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def note(reached: str) -> None:
        if reached == moment:
            path = folder / f"{os.getpid()}.tmp"
            path.write_text(str(os.getpid()))
            path.rename(folder / f"rank {os.getpid()}")

    def end_later() -> None:
        note("before")
        while moment == "before" and not (folder / "killed").exists():
            time.sleep(0.01)
        end_with_launcher()

    def join(env: RankEnv) -> AbstractContextManager[World]:
        note("while they join")
        while moment == "while they join" and env.rank:  # rank 0 waits for this rank
            time.sleep(1)
        return join_world(env)

    def run(_world: World) -> None:
        note("in the function")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as while a checkpoint is saved
        while True:
            time.sleep(1)

    with (
        forking_launcher(),
        mock.patch.object(local, "end_with_launcher", end_later),
        mock.patch.object(local, "join_world", join),
    ):
        run_on_local_ranks(2, run)
    sys.exit(0)


def _is_running(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
