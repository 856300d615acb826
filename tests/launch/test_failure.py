"""Which rank is told to have failed."""

import json
import os
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwise.launch.failure import find_failure


def leave_traceback(logs: Path, rank: int, text: str, *, second: int) -> None:
    file = logs / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    message = {"message": text, "extraInfo": {"py_callstack": f"Traceback\n{text}\n"}}
    file.write_text(json.dumps({"message": message}), encoding="utf-8")
    os.utime(file, (second, second))


def reported(rank: int, exit_code: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=rank, pid=4321, exitcode=exit_code, error_file="none")
    return ChildFailedError("run", {rank: failure})


def test_the_first_to_raise_is_told_not_the_first_to_be_seen(tmp_path: Path) -> None:
    leave_traceback(tmp_path, rank=0, text="PeerAborted: rank 2 raised", second=1001)
    leave_traceback(tmp_path, rank=2, text="ValueError: no", second=1000)
    failure = find_failure(reported(rank=0, exit_code=1), tmp_path)
    assert str(failure) == "rank 2 failed:\nTraceback\nValueError: no"


def test_a_rank_that_was_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    leave_traceback(tmp_path, rank=0, text="PeerLost: rank 1", second=1000)
    failure = find_failure(reported(rank=1, exit_code=-signal.SIGKILL), tmp_path)
    assert str(failure) == "rank 1 was stopped by SIGKILL (pid 4321)"


def test_a_rank_may_leave_nothing(tmp_path: Path) -> None:
    failure = find_failure(reported(rank=3, exit_code=5), tmp_path)
    assert str(failure) == "rank 3 ended with exit code 5 and no traceback"
