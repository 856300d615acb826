"""The pool's end of one rank: starts it, talks to it, and reports how it ended.

Ranks are forked (`tests.forked`), because importing torch takes seconds and many tests end theirs.
"""

import contextlib
import os
import pickle
import signal
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from tests.forked import start_forked

END_SECONDS = 20.0  # until it is known how a rank that has closed its connection has ended
STACKS_SECONDS = 10.0  # until a rank shows its stacks
QUIET_SECONDS = 0.5  # after which it has shown all of them
POLL_SECONDS = 0.05
OUTPUT_TAIL_BYTES = 4000
MODULE_OF_RANKS = Path(__file__).with_name("rank_process.py")


class RankProcess:
    """The parent's end of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.stacks = folder / f"stacks{rank}"
        self.output = folder / f"output{rank}"
        self.output.touch()
        self.socket, theirs = Pipe()
        arguments = (theirs, self.stacks, self.output, rank, world_size)
        with theirs:
            self.process = start_forked(_run, *arguments)
        self.output_start = 0

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it has been started"
        return self.process.pid

    def send(self, request: bytes) -> None:
        self.output_start = self.output.stat().st_size
        try:
            self.socket.send_bytes(request)
        except OSError:
            return  # it is dead, as whoever waits for its answer is about to find out

    def has_died(self) -> bool:
        """Its process has ended and all that it sent has been read."""
        return not self.process.is_alive() and not self.socket.poll()

    def receive(self) -> tuple[bool, bytes] | None:
        """(returned, pickled result), (raised, traceback), or None from a rank that is dead."""
        if self.has_died():  # reading would block while a child of the rank holds the socket
            return None
        try:
            reply: tuple[bool, bytes] = pickle.loads(self.socket.recv_bytes())
        except (EOFError, OSError):  # closed
            return None
        return reply

    def describe_death(self) -> str:
        self.process.join(END_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def read_output(self) -> str:
        """What the rank printed in this call (its tail)."""
        with self.output.open("rb") as output:
            start = max(self.output_start, self.output.stat().st_size - OUTPUT_TAIL_BYTES)
            output.seek(start)
            text = output.read().decode(errors="replace").strip()
        return f"\n--- what it printed ---\n{text}" if text else ""

    def read_stacks(self) -> str:
        """Where each of the rank's threads stands."""
        before = self.stacks.stat().st_size
        if not self.process.is_alive():
            return "(it has ended)"
        os.kill(self.pid, signal.SIGUSR1)
        size = _wait_for_end_of_growth(self.stacks, before)
        with self.stacks.open() as stacks:
            stacks.seek(before)
            return _own_stacks(stacks.read()) if size > before else "(it shows no stacks)"

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.join()
        with contextlib.suppress(ProcessLookupError):  # what a test of this rank left running
            os.killpg(self.pid, signal.SIGKILL)


def _run(*arguments: Any) -> None:
    """The main function of the process."""
    # Imported there alone: it takes seconds, also in a process that only hands tests to others.
    from tests import rank_process  # noqa: PLC0415

    rank_process.run(*arguments)


def _wait_for_end_of_growth(path: Path, before: int) -> int:
    """The size of a file that another process is writing, once it has stopped growing."""
    end, size = time.monotonic() + STACKS_SECONDS, before
    while time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        if (new := path.stat().st_size) != size:
            size, end = new, time.monotonic() + QUIET_SECONDS
    return size


def _own_stacks(stacks: str) -> str:
    """The frames of the test and of torch, without those of the harness that calls them."""
    threads = [thread for thread in stacks.strip().split("\n\n") if "read_requests" not in thread]
    harness = f'\n  File "{MODULE_OF_RANKS}'
    return "\n\n".join(thread.split(harness)[0] for thread in threads)
