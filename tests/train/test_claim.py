"""One job at a time in a run directory."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train import claim
from shardwise.train.claim import JOB_FILE, check_owner, claimed
from tests.train.claimant import hold_in_process


def move_to_another_host(directory: Path) -> None:
    file = directory / JOB_FILE
    job = json.loads(file.read_text())
    job["owner"]["host"] = "another"
    file.write_text(json.dumps(job))


@contextmanager
def left_by_another_host(directory: Path) -> Iterator[None]:
    """A directory whose owner on another host was killed."""
    os.kill(hold_in_process(directory), signal.SIGKILL)
    move_to_another_host(directory)
    yield


def test_a_job_that_lives_keeps_others_out_until_it_is_killed(tmp_path: Path) -> None:
    pid = hold_in_process(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {pid} on .*; choose another, or end"):
        claimed(tmp_path).__enter__()
    os.kill(pid, signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim, "WATCH_SECONDS", 1e9)  # on this host nothing has to be watched
        while not _can_be_claimed(tmp_path):  # until the process has ended
            time.sleep(0.01)


def test_a_copy_of_the_directory_is_not_in_use(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    pid = hold_in_process(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert _can_be_claimed(tmp_path / "copy")
    assert not _can_be_claimed(tmp_path / "run")
    os.kill(pid, signal.SIGKILL)


def test_slurm_has_queued_a_job_again_if_it_was_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables stay set for all later commands of the job, also in other directories."""

    def run(job: str, restarts: str) -> bool:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        is_requeued = claim.is_requeued(tmp_path)
        with claimed(tmp_path):
            return is_requeued

    assert not run("7", "1"), "there was no job"
    assert not run("7", "1"), "another command of the same job"
    assert run("7", "2")
    assert not run("8", "1"), "another job"
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    with claimed(tmp_path):
        assert not claim.is_requeued(tmp_path)
    assert run("8", "1")


def _can_be_claimed(directory: Path) -> bool:
    try:
        with claimed(directory):
            return True
    except ConfigError:
        return False


def test_a_job_on_another_host_is_seen_by_the_file_that_it_renews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.05)
    with claimed(tmp_path):
        file = tmp_path / JOB_FILE
        before = file.stat().st_mtime_ns
        while file.stat().st_mtime_ns == before:
            time.sleep(0.01)
    ended, path = threading.Event(), tmp_path / "other"
    path.mkdir()
    with left_by_another_host(path):
        renewing = threading.Thread(target=_renew_by_name, args=(path / JOB_FILE, ended))
        renewing.start()
        try:
            with pytest.raises(ConfigError, match=r"in use by process .* on another"):
                claimed(path).__enter__()
        finally:
            ended.set()
            renewing.join()


def _renew_by_name(file: Path, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        os.utime(file)


def test_a_job_that_was_killed_on_another_host_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "WATCH_SECONDS", 0.2)
    with left_by_another_host(tmp_path):
        assert _can_be_claimed(tmp_path)


def test_a_job_that_has_ended_delays_nobody(tmp_path: Path) -> None:
    with claimed(tmp_path):
        pass
    move_to_another_host(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim, "_is_alive", None)
        assert _can_be_claimed(tmp_path)


def test_a_job_that_was_thought_dead_ends_before_it_saves(tmp_path: Path) -> None:
    with claimed(tmp_path) as first:
        check_owner(tmp_path, first)
        with claimed(tmp_path) as second:  # this process has ended, as far as the first one goes
            check_owner(tmp_path, second)
            with pytest.raises(ConfigError, match=r"has taken .* over"):
                check_owner(tmp_path, first)
        with pytest.raises(ConfigError, match=r"has taken .* over"):  # and after it has ended
            check_owner(tmp_path, first)
    assert json.loads((tmp_path / JOB_FILE).read_text())["owner"]["token"] != first


def test_a_file_that_says_nothing_blocks_nobody(tmp_path: Path) -> None:
    for content in ("", "{}", "[1]", '{"ended": false, "owner": {"host": 1}}'):
        (tmp_path / JOB_FILE).write_text(content)
        assert _can_be_claimed(tmp_path)
