"""Finds the rank that failed first, and its error."""

import json
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shardwise.errors import RankError

__all__ = ["first_failure"]


def first_failure(error: ChildFailedError, logs: Path) -> RankError:
    """The error of the rank that failed first, from the files <logs>/.../<rank>/error.json.

    The launcher reports the rank whose exit it saw first. This may be a different rank, because
    every rank that waits for a failed rank fails too. The order is given by the modification times
    of the files that ranks write when they raise.
    """
    files = sorted(logs.glob("**/error.json"), key=lambda file: file.stat().st_mtime_ns)
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankError(f"rank {rank} was killed by {name} (pid {failure.pid})")
    if not files:
        return RankError(f"rank {rank} exited with code {failure.exitcode} and no traceback")
    message = json.loads(files[0].read_text(encoding="utf-8"))["message"]
    traceback = message["extraInfo"]["py_callstack"].rstrip()
    return RankError(f"rank {files[0].parent.name} failed:\n{traceback}")
