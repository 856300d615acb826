"""Starts a lighthouse and several replicas of a run on this machine."""

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path

from shardwise.errors import PackageMissing, RankError
from shardwise.launch.local import end_with_launcher
from shardwise.launch.stop_signal import STOP_SIGNALS
from shardwise.launch.world import CONFIG_EXIT_CODE

__all__ = ["run_replicas"]

_MAX_RESTARTS = 3  # of each replica
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 60.0  # for replicas to end after the first one that has trained all steps

Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class _Replica:
    process: SpawnProcess
    directory: str
    started: float = field(default_factory=time.time)

    def has_trained(self) -> bool:
        """Whether it has trained a step since it has started."""
        path = Path(self.directory, "metrics.jsonl")
        return path.exists() and path.stat().st_mtime >= self.started


def run_replicas(
    main: Main, arguments: Sequence[str], count: int, num_ranks: int, directory: str
) -> None:
    """Run the command ``main(arguments)`` ``count`` times, and start replicas that die again.

    Replica n uses ``directory``/n; one that has died begins in ``directory``/n-1 and so on, with
    the state of a live one. One that fails too often raises a RankError, a signal SystemExit.
    """
    PackageMissing.check("torchft", extra="ft", needed_for="--replicas")
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs each quorum otherwise
    threads = max(1, (os.cpu_count() or 1) // (count * num_ranks))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000
    )
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    common = [*arguments, *_set("replicas.lighthouse", address), *_set("replicas.count", count)]
    stopped: list[int] = []
    handlers = {
        stop: signal.signal(stop, lambda number, _: stopped.append(number)) for stop in STOP_SIGNALS
    }
    lives = dict.fromkeys(range(count), 0)
    running = {number: _start(main, common, number, f"{directory}/{number}") for number in lives}
    late: set[int] = set()  # they had not joined when another one ended, and would begin alone
    try:
        until = math.inf
        while running.keys() - late and not stopped and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            for number in [n for n, one in running.items() if one.process.exitcode is not None]:
                code = running.pop(number).process.exitcode
                if code == 0:
                    if until == math.inf:
                        late = {n for n, one in running.items() if not one.has_trained()}
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
                    continue
                lives[number] += 1
                if code == CONFIG_EXIT_CODE or lives[number] > _MAX_RESTARTS:
                    raise RankError(f"replica {number} ended with code {code}")
                if until == math.inf:
                    again = f"{directory}/{number}-{lives[number]}"
                    sys.stderr.write(
                        f"shardwise: replica {number} ended with code {code}; it starts again in "
                        f"{again}\n"
                    )
                    running[number] = _start(main, common, number, again)
        if stopped:
            raise SystemExit(128 + stopped[0])
        for number in late & running.keys():
            sys.stderr.write(
                f"shardwise: replica {number} is stopped: it had trained no step when another one "
                "ended\n"
            )
    finally:
        _end([one.process for one in running.values()], stopped)
        for stop, handler in handlers.items():
            signal.signal(stop, handler)
        lighthouse.shutdown()


def _set(key: str, value: object) -> list[str]:
    return ["--set", f"{key}={value}"]


def _start(main: Main, common: Sequence[str], number: int, directory: str) -> _Replica:
    own = [*common, *_set("replicas.number", number), *_set("run.directory", directory)]
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(main, own))
    replica = _Replica(process, directory)
    process.start()
    return replica


def _run(main: Main, arguments: list[str]) -> None:
    end_with_launcher()
    sys.exit(main(arguments))


def _end(processes: Iterable[SpawnProcess], stopped: Sequence[int]) -> None:
    """Stop ``processes`` with the signal that has stopped this one; they save a checkpoint."""
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, stopped[0] if stopped else signal.SIGTERM)
    for process in processes:
        process.join()
