"""Replicas in processes of their own, with a lighthouse: started, killed and started again."""

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from tests.forked import start_forked

__all__ = ["DEADLINE_SECONDS", "Job", "Replica", "Seat"]

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is imported
pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 only")
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

DEADLINE_SECONDS = 90.0  # for anything that a test waits for
TIMEOUT = timedelta(seconds=30)  # of a collective between replicas
ANSWER_TIMEOUT = timedelta(seconds=30)  # of a manager, whose ranks end without an answer
LOOPBACK = "127.0.0.1"
Program = Callable[..., None]


@dataclass(frozen=True)
class Seat:
    """The place of one process: rank ``rank`` of replica ``number``."""

    number: int
    rank: int
    num_ranks: int
    port: int  # of the replica's store
    lighthouse: str
    folder: Path
    timeout: timedelta

    def manager(self, **options: Any) -> Manager:
        """The manager of this rank; it fails a collective after `TIMEOUT`."""
        defaults: dict[str, Any] = {
            "pg": ProcessGroupGloo(timeout=self.timeout),
            "load_state_dict": None,
            "state_dict": None,
            "min_replica_size": 1,
            "rank": self.rank,
            "world_size": self.num_ranks,
            "store_addr": LOOPBACK,
            "store_port": self.port,
            "lighthouse_addr": self.lighthouse,
            "replica_id": f"replica{self.number}",
            "hostname": LOOPBACK,
            "timeout": ANSWER_TIMEOUT,
            "quorum_timeout": timedelta(seconds=DEADLINE_SECONDS),
        }
        return Manager(**defaults | options)

    def log(self, event: str, **values: Any) -> None:
        """Append a line to the log of this rank, which a kill does not lose."""
        line = json.dumps({"event": event, "at": time.time(), **values}) + "\n"
        path = self.folder / f"{self.number}-{self.rank}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

    def die(self) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def last_step(self) -> float:
        """The number of steps to train, once the test has called ``job.end_after``."""
        path = self.folder / "steps"
        return int(path.read_text()) if path.exists() else math.inf

    def wait_for(self, name: str) -> None:
        """Wait until the test has called ``job.allow(name)``."""
        until = time.monotonic() + DEADLINE_SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"{name} was not allowed"
            time.sleep(0.01)


def _run(seat: Seat, program: Program, options: dict[str, Any], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    torch.set_num_threads(1)
    code = 1
    try:
        store = TCPStore(LOOPBACK, seat.port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("world", store),
            rank=seat.rank,
            world_size=seat.num_ranks,
            timeout=timedelta(seconds=DEADLINE_SECONDS),
        )
        program(seat, **options)
        code = 0
    except BaseException:  # noqa: BLE001 - shown by the test
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # servers of torchft have threads that do not end


def _serve(file: Path, port: int, min_replicas: int) -> None:
    """Serve as a lighthouse, whose port is in ``file``, until this process is killed."""
    server = LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=30_000,  # of a replica that is alive
        quorum_tick_ms=20,
        heartbeat_timeout_ms=6_000,  # a process may stand still for some seconds
    )
    new = file.with_suffix(".new")
    new.write_text(server.address().rpartition(":")[2])
    new.rename(file)
    signal.pause()


@dataclass
class Replica:
    """The processes of one life of a replica."""

    number: int
    store: Any
    ranks: list[BaseProcess]
    folder: Path
    may_fail: bool = False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all of its ranks; those that miss one that is killed first may fail."""
        self.may_fail |= number == signal.SIGKILL
        for rank in self.ranks:
            if rank.pid is not None and rank.exitcode is None:
                os.kill(rank.pid, number)

    def kill_rank(self, rank: int) -> None:
        """Kill one of its ranks; the others may fail."""
        self.may_fail = True
        self.ranks[rank].kill()

    def has_failed(self) -> bool:
        """Whether an error has ended a rank, other than the death of another rank of it."""
        return (
            not self.may_fail
            and any(rank.exitcode == 1 for rank in self.ranks)
            and all(rank.exitcode != -signal.SIGKILL for rank in self.ranks)
        )

    def has_ended_with(self, code: int) -> bool:
        """Whether all of its ranks have ended with this exit ``code``."""
        return all(rank.exitcode == code for rank in self.ranks)

    def join_killed(self) -> None:
        """Wait for the end of its ranks. One kills itself; another may see that, and fail."""
        codes = self.join()
        assert -signal.SIGKILL in codes
        assert set(codes) <= {-signal.SIGKILL, 1}, codes

    def join(self) -> list[int | None]:
        """Wait for the end of its ranks; their exit codes, None for one that does not end."""
        until = time.monotonic() + DEADLINE_SECONDS
        for rank in self.ranks:
            rank.join(max(0.0, until - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]

    def end(self) -> None:
        """Kill what is left of it."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


@dataclass
class Job:
    """A lighthouse, and the replicas that a test starts; all of them end with the ``with``."""

    num_ranks: int = 2
    min_replicas: int = 1
    replicas: list[Replica] = field(default_factory=list)
    _read: dict[Path, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        self.folder = Path(self._directory.name)
        self.output = self.folder / "output.txt"
        self.output.touch()
        self.start_lighthouse()
        return self

    def start_lighthouse(self) -> None:
        """Start the lighthouse, at the same address if there was one."""
        file = self.folder / "port"
        port = int(file.read_text()) if file.exists() else 0
        file.unlink(missing_ok=True)
        self._lighthouse = start_forked(_serve, file, port, self.min_replicas)
        self.wait_until(file.exists)

    def kill_lighthouse(self) -> None:
        """Kill the process of the lighthouse."""
        self._lighthouse.kill()
        self._lighthouse.join()

    @property
    def address(self) -> str:
        """Of the lighthouse."""
        return f"http://{LOOPBACK}:{(self.folder / 'port').read_text()}"

    def start(self, number: int, program: Program, **options: Any) -> Replica:
        """Start replica ``number``, whose ranks call ``program(seat, **options)``."""
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        seats = [
            Seat(number, rank, self.num_ranks, store.port, self.address, self.folder, TIMEOUT)
            for rank in range(self.num_ranks)
        ]
        ranks = [start_forked(_run, seat, program, options, str(self.output)) for seat in seats]
        self.replicas.append(Replica(number, store, ranks, self.folder))
        return self.replicas[-1]

    def begin(self, num_replicas: int, program: Program, **options: Any) -> list[Replica]:
        """Start replicas that call ``seat.wait_for("start")``, and let them begin together."""
        started = [self.start(number, program, **options) for number in range(num_replicas)]
        self.allow_when_ready(num_replicas)
        return started

    def allow_when_ready(self, num_replicas: int) -> None:
        """Let replicas begin when the lighthouse knows all of them, and so awaits them."""
        ranks = [(number, rank) for number in range(num_replicas) for rank in range(self.num_ranks)]
        self.wait_until(lambda: all(self.lines(*rank, "ready") for rank in ranks))
        self.wait_until(lambda: self._num_replicas("heartbeating") >= num_replicas)
        self.allow("start")

    def wait_until_asked(self, num_replicas: int = 1) -> None:
        """Wait until as many replicas wait for a quorum, while the others wait for the test.

        To those that train, the lighthouse gives a quorum without one that has not asked yet.
        """
        self.wait_until(lambda: self._num_replicas("participants healthy") >= num_replicas)

    def _num_replicas(self, what: str) -> int:
        """A number of the status page of the lighthouse, as in "[1/1 participants healthy]"."""
        connection = HTTPConnection(LOOPBACK, int((self.folder / "port").read_text()), timeout=10)
        try:
            connection.request("GET", "/status")
            page = connection.getresponse().read().decode()
        except (OSError, HTTPException):
            return 0
        finally:
            connection.close()
        found = re.search(rf"\[(\d+)(/\d+)? {what}\]", page)
        assert found, page
        return int(found[1])

    def allow(self, name: str) -> None:
        """Let ranks go on that `Seat.wait_for` it."""
        (self.folder / name).touch()

    def lines(self, number: int, rank: int = 0, event: str = "") -> list[dict[str, Any]]:
        """What a rank has logged, in all lives of its replica."""
        path = self.folder / f"{number}-{rank}.jsonl"
        offset, every = self._read.setdefault(path, (0, []))
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                whole, _, _ = file.read().rpartition(b"\n")  # the last line may not be complete yet
            if whole:
                every += map(json.loads, whole.splitlines())
                self._read[path] = offset + len(whole) + 1, every
        return [line for line in every if not event or line["event"] == event]

    def end_after(self, steps: int) -> None:
        """Let ranks end that train up to ``Seat.last_step()``; none of them has reached it."""
        (self.folder / "new").write_text(str(steps))
        (self.folder / "new").rename(self.folder / "steps")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``, and fail with the output of the ranks if it does not come."""
        until = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if time.monotonic() > until or any(replica.has_failed() for replica in self.replicas):
                raise AssertionError(self.output.read_text("utf-8")[-20_000:])
            time.sleep(0.01)

    def finish(self, *replicas: Replica) -> None:
        """Wait for the end of ``replicas``, which must succeed."""
        codes = [code for replica in replicas for code in replica.join()]
        assert not any(codes), f"{codes}\n{self.output.read_text('utf-8')[-20_000:]}"
        assert None not in codes, f"{codes}\n{self.output.read_text('utf-8')[-20_000:]}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for replica in self.replicas:
            replica.kill(signal.SIGCONT)
            replica.end()
        self.kill_lighthouse()
        self._directory.cleanup()
