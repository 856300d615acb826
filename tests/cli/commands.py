"""Starts ``shardwise`` as a user does, or in this process."""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.launcher.api import LaunchConfig

import shardwise.train.run  # noqa: F401 (so that it is preloaded, see `tests.forked`)
from shardwise.cli import main
from shardwise.launch import local
from tests.forked import start_forked

PATIENCE_SECONDS = 250.0

# Prefixes of the environment variables of launchers.
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


class Command:
    """A run of ``shardwise`` in its own process group.

    It is forked from the server of the ranks (`tests.forked`), which has imported torch, and
    forks the ranks that it starts itself.
    """

    main = staticmethod(main)

    def __init__(self, arguments: Sequence[str | Path], cwd: Path, **changes: str) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="command-")
        words = [str(word) for word in arguments]
        output = Path(self._output.name)
        self._process = start_forked(
            _run_command, self.main, words, cwd, environment(**changes), output
        )

    @property
    def pid(self) -> int:
        """The id of the process and of its process group."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition; fail the test if the command ends first, or after minutes."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end and self._process.is_alive():
            if condition():
                return
            time.sleep(0.02)
        pytest.fail(f"the condition was not met: {self.finish(kill=True)}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, and not to its group."""
        os.kill(self.pid, number)

    def finish(self, *, kill: bool = False) -> Finished:
        """Wait until the command ends; with ``kill``, kill it first."""
        if kill and self._process.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        if code is None:
            return self.finish(kill=True)
        texts = [(Path(self._output.name) / name).read_text("utf-8") for name in ("out", "err")]
        self._output.cleanup()
        return Finished(code, *texts)


def _run_command(
    main: Callable[[list[str]], int],
    arguments: list[str],
    cwd: Path,
    environ: dict[str, str],
    output: Path,
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    with forking_launcher():
        sys.exit(main(arguments))


def forking_launcher() -> AbstractContextManager[object]:
    """A context in which local ranks are forked from this process."""
    forking = partial(LaunchConfig, start_method="fork")
    return mock.patch.object(local, LaunchConfig.__name__, forking)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment without the variables of a launcher, and with ``changes``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | changes


@contextmanager
def reserved_port(address: str = "localhost") -> Iterator[int]:
    """Yield a port on which the server of a job may listen, and that no other process gets."""
    with socket.socket() as holder:
        # The server sets this option too, so it may use the port, on which this does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def run(arguments: Sequence[str | Path], cwd: Path, **changes: str) -> Finished:
    """Run ``shardwise`` with these arguments and wait for it."""
    return Command(arguments, cwd, **changes).finish()


def fail(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run a bad command line in this process and return its one-line error."""
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("shardwise: ")
    return line


def own_lines(stderr: str) -> list[str]:
    """The lines of stderr but those of libraries in C++, such as "[W1126 12:43:14 ..."."""
    theirs = re.compile(r".*\[Gloo\]|(\[rank\d+\]:)?\[[IWE]\d{4} ")
    return [line for line in stderr.splitlines() if not theirs.match(line)]


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]
