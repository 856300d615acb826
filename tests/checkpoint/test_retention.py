"""Retention removes old checkpoints of its own series, and never anything in use."""

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint import directory, write
from shardwise.checkpoint.directory import MARKER, Owner
from shardwise.checkpoint.stores import Folder
from tests.waiting import PATIENCE_SECONDS


def test_keeps_the_newest_and_every_nth(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    (tmp_path / "notes").mkdir()
    for step in range(9, 15):
        sw.save(tmp_path / f"step-{step}", model=model, retention=sw.Retention(2, every=5))
    assert _names(tmp_path) == ["notes", "step-10", "step-13", "step-14"]
    assert sw.latest(tmp_path) == tmp_path / "step-14"
    assert sw.latest(tmp_path / "notes") is None
    for last in (0, "2", None):
        with pytest.raises(sw.CheckpointError, match="expected positive integers"):
            sw.Retention(last)  # type: ignore[arg-type]


def test_a_checkpoint_saved_after_a_rollback_is_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    for step in (10, 20, 30, 40):
        sw.save(tmp_path / f"step-{step}", model=model)
    for step in (11, 12, 13):
        sw.save(tmp_path / f"step-{step}", model=model, retention=sw.Retention(2))
    assert _names(tmp_path) == ["step-12", "step-13", "step-20", "step-30", "step-40"]
    sw.save(tmp_path / "step-21", model=model, retention=sw.Retention(1))
    assert _names(tmp_path) == ["step-21", "step-30", "step-40"]


def test_other_series_in_the_same_directory_are_left_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    for step in (1, 2):
        for name in ("generator", "critic"):
            sw.save(tmp_path / f"{name}-{step}", model=model, retention=sw.Retention(1))
    sw.save(tmp_path / "final", model=model, retention=sw.Retention(1))
    assert _names(tmp_path) == ["critic-2", "final", "generator-2"]


@pytest.mark.parametrize("sibling", ["a-4", "b-1"])
def test_a_save_in_progress_in_this_process_is_not_removed(
    sibling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    commit = directory.commit

    def commit_later(folder: Folder, manifest: bytes, owner: Owner) -> None:
        if folder.name == sibling:
            entered.set()
            assert gate.wait(PATIENCE_SECONDS)
        commit(folder, manifest, owner)

    monkeypatch.setattr(write, "commit", commit_later)
    slow, fast = nn.Linear(2, 3), nn.Linear(2, 3)
    pending = sw.save(tmp_path / sibling, model=slow, wait=False)
    assert entered.wait(PATIENCE_SECONDS)
    sw.save(tmp_path / "a-5", model=fast, retention=sw.Retention(1))
    with pytest.raises(sw.CheckpointError, match=f"{sibling}: another save to this path"):
        sw.save(tmp_path / sibling, model=fast)
    gate.set()
    pending.wait()
    sw.load(tmp_path / sibling, model=fast)


def test_a_save_in_progress_in_another_process_is_not_removed(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    child = _start_unfinished_save(tmp_path / "step-1")
    try:
        before = _names(tmp_path / "step-1")
        sw.save(tmp_path / "step-2", model=model, retention=sw.Retention(1))
        assert _names(tmp_path / "step-1") == before
        with pytest.raises(sw.CheckpointError, match=f"step-1: process {child.pid} is writing"):
            sw.save(tmp_path / "step-1", model=model)
        assert _names(tmp_path / "step-1") == before
    finally:
        child.kill()
        child.wait()
    sw.save(tmp_path / "step-3", model=model, retention=sw.Retention(2))
    assert _names(tmp_path) == ["step-2", "step-3"]


def test_a_killed_process_that_its_parent_has_not_reaped_owns_nothing(tmp_path: Path) -> None:
    child = _start_unfinished_save(tmp_path / "step-1")
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    sw.save(tmp_path / "step-1", model=nn.Linear(2, 3))
    child.wait()
    sw.load(tmp_path / "step-1", model=nn.Linear(2, 3))


def test_a_new_process_with_the_same_number_does_not_own_the_remains(tmp_path: Path) -> None:
    _forge_marker(tmp_path / "step-1", created=psutil.Process().create_time() - 60)
    _forge_marker(tmp_path / "step-2", token="of a save that this process has ended")
    sw.save(tmp_path / "step-3", model=nn.Linear(2, 3), retention=sw.Retention(1))
    assert _names(tmp_path) == ["step-3"]


def test_remains_of_another_host_are_removed_when_they_are_old(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    _forge_marker(tmp_path / "step-1", host="elsewhere", saved_at=time.time() - 2 * 86400)
    _forge_marker(tmp_path / "step-2", host="elsewhere", saved_at=time.time() - 600)
    sw.save(tmp_path / "step-3", model=model, retention=sw.Retention(1))
    assert _names(tmp_path) == ["step-2", "step-3"]
    sw.save(tmp_path / "step-2", model=model)  # a restarted job resumes on another host
    sw.load(tmp_path / "step-2", model=model)


def test_remains_without_an_owner_are_removed_after_a_moment(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER).touch()
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "step-1" / MARKER, (hour_ago, hour_ago))
    sw.save(tmp_path / "step-3", model=nn.Linear(2, 3), retention=sw.Retention(1))
    assert _names(tmp_path) == ["step-2", "step-3"]  # step-2 may be about to get its owner


def test_a_save_whose_path_was_taken_over_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = directory.commit

    def commit_after_takeover(folder: Folder, manifest: bytes, owner: Owner) -> None:
        _forge_marker(tmp_path / "x", host="elsewhere")
        commit(folder, manifest, owner)

    monkeypatch.setattr(write, "commit", commit_after_takeover)
    with pytest.raises(sw.CheckpointError, match="x: another process began a save to this path"):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3))
    assert (tmp_path / "x" / MARKER).exists(), "the other save's marker was removed"


def test_symbolic_links_are_not_followed_and_their_targets_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    outside = tmp_path / "outside"
    sw.save(outside / "model-0", model=model)
    root = tmp_path / "root"
    for step in (3, 4):
        sw.save(root / f"step-{step}", model=model)
    (root / "best").symlink_to("step-3")
    (root / "step-1").symlink_to(outside / "model-0")
    for step in (5, 6):
        sw.save(root / f"step-{step}", model=model, retention=sw.Retention(1))
    assert _names(root) == ["best", "step-1", "step-3", "step-6"]
    for path in (root / "best", root / "step-1", outside / "model-0"):
        sw.load(path, model=model)


def test_a_link_to_a_killed_save_is_not_followed(tmp_path: Path) -> None:
    _forge_marker(tmp_path / "outside", host="elsewhere", saved_at=0.0)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-1").symlink_to(tmp_path / "outside")
    sw.save(tmp_path / "root" / "step-2", model=nn.Linear(2, 3), retention=sw.Retention(1))
    assert _names(tmp_path / "outside") == [MARKER]


def test_a_checkpoint_that_another_process_removes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 3)
    sw.save(tmp_path / "step-1", model=model)
    discard = directory.discard

    def discard_twice(folder: Folder) -> None:
        discard(folder)
        discard(folder)

    monkeypatch.setattr(directory, "discard", discard_twice)
    sw.save(tmp_path / "step-2", model=model, retention=sw.Retention(1))
    assert _names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("check", ["is_dir", "is_file"])
def test_checkpoints_that_another_process_removes_while_they_are_listed(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-1"
    sw.save(path, model=nn.Linear(2, 3))
    original = getattr(Path, check)

    def check_and_remove(checked: Path) -> bool:
        found: bool = original(checked)
        if path in (checked, checked.parent):
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, check, check_and_remove)
    assert sw.latest(path) is None


def _start_unfinished_save(path: Path) -> "subprocess.Popen[bytes]":
    """Start a process that owns an unfinished save to ``path``."""
    child = subprocess.Popen(["sleep", "120"])
    _forge_marker(path, pid=child.pid, created=psutil.Process(child.pid).create_time())
    (path / "model.safetensors").write_bytes(b"partial")
    return child


def _forge_marker(path: Path, **fields: object) -> None:
    """Create the marker of a save by this process, with some ``fields`` replaced."""
    path.mkdir(exist_ok=True)
    owner = Owner.current()
    (path / MARKER).write_text(json.dumps({**vars(owner), **fields}), encoding="utf-8")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
