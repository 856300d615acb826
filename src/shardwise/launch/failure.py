"""Which rank failed first, and why."""

import json
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shardwise.launch.errors import RankError

__all__ = ["find_failure"]


def find_failure(error: ChildFailedError, logs: Path) -> RankError:
    """The failure that came first.

    The launcher reports the rank whose end it saw first, which may be a neighbour of the culprit:
    every rank that waits for a failed one fails too. The files that the ranks leave when they
    raise tell the order.

    Args:
        error: what the launcher raised.
        logs: the directory that it was told to keep its files in, <logs>/.../<rank>/error.json.
    """
    files = sorted(logs.glob("**/error.json"), key=lambda file: file.stat().st_mtime_ns)
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankError(f"rank {rank} was stopped by {name} (pid {failure.pid})")
    if not files:
        return RankError(f"rank {rank} ended with exit code {failure.exitcode} and no traceback")
    message = json.loads(files[0].read_text(encoding="utf-8"))["message"]
    traceback = message["extraInfo"]["py_callstack"].rstrip()
    return RankError(f"rank {files[0].parent.name} failed:\n{traceback}")
