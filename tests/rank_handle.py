"""The pool's end of one rank: starting it, talking to it, finding out what became of it."""

import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RANK_PROCESS = str(REPOSITORY / "tests" / "rank_process.py")
STACKS_SECONDS = 2.0
POLL_SECONDS = 0.05
OUTPUT_TAIL_BYTES = 4000


class RankProcess:
    """The parent's end of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.stacks = folder / f"stacks{rank}"
        self.output = folder / f"output{rank}"
        self.socket, theirs = Pipe()
        with theirs, self.output.open("w") as output:
            self.process = subprocess.Popen(
                _command(theirs.fileno(), folder, rank, world_size),
                cwd=REPOSITORY,
                env=os.environ | _environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which then kills its ranks
            )
        self.output_start = 0

    def send(self, request: bytes) -> None:
        self.output_start = self.output.stat().st_size
        try:
            self.socket.send_bytes(request)
        except OSError:
            return  # it is dead, as whoever waits for its answer is about to find out

    def has_died(self) -> bool:
        """Its process is gone and all that it sent has been read."""
        return self.process.poll() is not None and not self.socket.poll()

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
        try:
            code = self.process.wait(STACKS_SECONDS)
        except subprocess.TimeoutExpired:
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
        try:
            self.process.send_signal(signal.SIGUSR1)
        except OSError:
            return "(gone)"
        size = _wait_for_end_of_growth(self.stacks, before)
        with self.stacks.open() as stacks:
            stacks.seek(before)
            return _own_stacks(stacks.read()) if size > before else "(it shows no stacks)"

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


def _command(socket: int, folder: Path, rank: int, world_size: int) -> list[str]:
    arguments = [str(socket), str(folder), str(rank), str(world_size)]
    return [sys.executable, "-u", "-m", "tests.rank_process", *arguments]


def _environment() -> dict[str, str]:
    chosen = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}  # such options are for the parent
    # Gloo binds to whatever the host's name resolves to, which on many machines is not reachable.
    return chosen | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def _wait_for_end_of_growth(path: Path, before: int) -> int:
    """The size of a file that another process is writing, once it has stopped growing."""
    end = time.monotonic() + STACKS_SECONDS
    size = last = before
    while time.monotonic() < end and (size == before or size != last):
        last = size
        time.sleep(POLL_SECONDS)
        size = path.stat().st_size
    return size


def _own_stacks(stacks: str) -> str:
    """What the test and torch are doing, without what ``rank_process`` runs them in."""
    threads = [thread for thread in stacks.strip().split("\n\n") if "read_requests" not in thread]
    return "\n\n".join(thread.split('\n  File "' + RANK_PROCESS)[0] for thread in threads)
