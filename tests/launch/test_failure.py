"""Which rank is reported."""

import json
import os
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwise.launch.local import first_failure


def leave_traceback(logs: Path, rank: int, text: str, *, second: int) -> None:
    file = logs / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    message = {"message": text, "extraInfo": {"py_callstack": f"Traceback\n{text}\n"}}
    file.write_text(json.dumps({"message": message}), encoding="utf-8")
    os.utime(file, (second, second))


def reported(rank: int, exit_code: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=rank, pid=4321, exitcode=exit_code, error_file="none")
    return ChildFailedError("run", {rank: failure})


def test_the_first_rank_to_raise_is_reported_not_the_first_to_exit(tmp_path: Path) -> None:
    leave_traceback(tmp_path, rank=0, text="PeerAborted: rank 2 raised", second=1001)
    leave_traceback(tmp_path, rank=2, text="ValueError: no", second=1000)
    failure = first_failure(reported(rank=0, exit_code=1), tmp_path)
    assert str(failure) == "rank 2 failed:\nTraceback\nValueError: no"


def test_a_killed_rank_is_reported_with_its_signal(tmp_path: Path) -> None:
    leave_traceback(tmp_path, rank=0, text="PeerLost: rank 1", second=1000)
    failure = first_failure(reported(rank=1, exit_code=-signal.SIGKILL), tmp_path)
    assert str(failure) == "rank 1 was killed by SIGKILL (pid 4321)"


def test_a_rank_without_a_traceback(tmp_path: Path) -> None:
    failure = first_failure(reported(rank=3, exit_code=5), tmp_path)
    assert str(failure) == "rank 3 exited with code 5 and no traceback"
