"""A process that trains in a directory, as far as another job can see."""

import time
from pathlib import Path

from shardwise.train.claim import JOB_FILE, claimed
from tests.forked import start_forked


def hold(directory: Path) -> None:
    with claimed(directory):
        time.sleep(1000)


def hold_in_process(directory: Path) -> int:
    """The id of a process that holds ``directory``."""
    process = start_forked(hold, directory)
    while not (directory / JOB_FILE).exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    return process.pid
