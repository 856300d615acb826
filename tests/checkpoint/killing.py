"""Kill saves at random moments, and check the checkpoints that are left."""

import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import directory
from shardwise.checkpoint.directory import MARKER, is_complete
from shardwise.checkpoint.offline import examine
from shardwise.checkpoint.stores import folder_at

ROUNDS = 16
RETENTION = sw.Retention(last=2)


def kill_saves(folder: Path) -> None:
    """In each round, fork a child that saves checkpoints, kill it, and check the directory.

    Call this in a process with one rank and one thread.
    """
    rng = random.Random(3)
    started = time.perf_counter()
    save(folder, 0, make(0))
    seconds = time.perf_counter() - started  # duration of a save under the current load
    reached, remains = 0, 0
    for _ in range(ROUNDS):
        ready, started_save = os.pipe()
        child = os.fork()
        if child == 0:
            save_forever(folder, reached + 1, started_save)
        os.close(started_save)
        for _ in range(rng.randrange(1, 4)):
            os.read(ready, 1)  # the child starts another save
        time.sleep(rng.random() * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        reached = check(folder, reached)
        remains += sum((path / MARKER).exists() for path in folder.iterdir())
    assert reached > 0, "no save was ever complete"
    assert remains > 0, "no save was ever interrupted"
    with mock.patch.object(directory, "EMPTY_MARKER_SECONDS", 0.0):  # no other save is running
        save(folder, reached + 1, make(reached + 1))
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-{reached:06}",
        f"step-{reached + 1:06}",
    ]


def save_forever(folder: Path, first: int, started_save: int) -> None:
    """Save checkpoints in a child until it is killed."""
    try:
        model = make(first)
        for number in range(first, 1 << 30):
            with torch.no_grad():
                model.weight.fill_(number)
            os.write(started_save, b"x")
            save(folder, number, model)
    finally:
        os._exit(1)


def save(folder: Path, number: int, model: nn.Module) -> None:
    sw.save(folder / f"step-{number:06}", model=model, retention=RETENTION, max_file_bytes=1000)


def make(number: int) -> nn.Linear:
    model = nn.Linear(300, 400)
    with torch.no_grad():
        model.weight.fill_(number)
    return model


def check(folder: Path, reached: int) -> int:
    """Check that the last complete checkpoint is intact and no older than the previous one."""
    path = sw.latest(folder)
    if path is None:
        assert reached < 0, "a complete checkpoint was lost"
        return reached
    assert is_complete(folder_at(path))
    assert examine(path) == []
    number = int(path.name[-6:])
    assert number >= reached
    model = make(-1)
    sw.load(path, model=model)
    assert torch.equal(model.weight, torch.full_like(model.weight, number))
    return number
