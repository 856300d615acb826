"""``python -m tests.soak --kills 100``: kill training runs repeatedly and check their checkpoints.

A tiny run on local ranks is killed at random moments (SIGKILL to its process group: while it
starts, trains, saves or removes old checkpoints) and restarted, until it completes; then the next
run begins. After each kill, the last complete checkpoint must not be older than the one before, and
must have the same bytes as an undisturbed run at that step. At the end, the metrics must equal the
undisturbed ones, with each step once. Runs in a separate process, because it forks: torch is
imported only once.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Imports everything that a rank needs, before it is forked.
import shardwise.train.run
from shardwise.checkpoint.directory import MARKER, complete, latest
from shardwise.checkpoint.stores import folder_at
from shardwise.cli import main as command_line

STEPS = 40
DEADLINE_SECONDS = 300.0  # of one attempt
CONFIG = """
[model]
layers = 2
heads = 1
width = 8
context = 8

[data]
path = {text}

[train]
steps = {steps}
global_batch = 4
warmup_share = 0.1
validation_batches = 1

[checkpoint]
every = 1

[sample]
bytes = 0
"""


@dataclass
class Counts:
    """The number of kills and runs so far."""

    kills: int = 0
    in_start: int = 0  # kills before the first step of an attempt
    in_save: int = 0  # kills that left an unfinished checkpoint
    runs: int = 0
    saved: set[int] = field(default_factory=set)  # steps whose checkpoints were compared


class Attempt:
    """One start of a run, in its own process group."""

    def __init__(self, arguments: list[str], num_ranks: int, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.log = log
        self.pids: list[int] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if not pid:
                _run_rank(rank, num_ranks, port, arguments, log, self.pids)
            self.pids.append(pid)
            os.setpgid(pid, self.pids[0])

    def kill(self) -> None:
        """Kill all ranks at once; they may have ended already."""
        os.killpg(self.pids[0], signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)

    def has_ended(self) -> bool:
        return all(_has_ended(pid) for pid in self.pids)

    def finish(self) -> None:
        """Return when all ranks have ended successfully."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        output = self.log.read_text(encoding="utf-8")[-4000:]
        assert not any(codes), f"exit codes {codes}:\n{output}"


class Soak:
    """An undisturbed run, and the killed runs that are compared with it."""

    def __init__(self, folder: Path, num_ranks: int, seed: int, steps: int) -> None:
        self.counts = Counts()
        self._folder = folder
        self._num_ranks = num_ranks
        self._random = random.Random(seed)
        self._steps = steps
        self._config = folder / "config.toml"
        text = json.dumps(str(Path(sysconfig.get_path("stdlib")) / "json"))
        self._config.write_text(CONFIG.format(text=text, steps=steps), encoding="utf-8")
        self._whole = folder / "whole"
        self._start(self._whole, "checkpoint.keep=1000000").finish()

    def run(self, kills: int) -> Counts:
        """Kill runs ``kills`` times in total, and complete each run."""
        while self.counts.kills < kills:
            directory = self._folder / f"run-{self.counts.runs}"
            # Every other run saves asynchronously.
            options = [f"checkpoint.wait={str(self.counts.runs % 2 == 0).lower()}"]
            reached = 0
            while self.counts.kills < kills and self._attempt(directory, options):
                reached = self._check(directory, reached)
            if not (directory / "summary.json").exists():
                self._start(directory, *options).finish()
            self._check_end(directory)
            self.counts.runs += 1
        return self.counts

    def _attempt(self, directory: Path, options: list[str]) -> bool:
        """Start a run and kill it; return False if it completed before."""
        metrics = directory / "metrics.jsonl"
        # One attempt in eight is killed while it starts, the others after they write metrics.
        in_start = self._random.random() < 1 / 8
        attempt = self._start(directory, *options)
        try:
            if not in_start:
                before = _size(metrics)
                _wait(lambda: attempt.has_ended() or _size(metrics) != before)
            time.sleep(self._random.random() * (1.0 if in_start else 0.3))
        except BaseException:
            attempt.kill()
            raise
        if attempt.has_ended():
            attempt.finish()
            return False
        attempt.kill()
        self.counts.kills += 1
        self.counts.in_start += in_start
        return True

    def _check(self, directory: Path, reached: int) -> int:
        """Compare the complete checkpoints with the undisturbed run; return the last step."""
        folder = directory / "checkpoints"
        found = list(folder.iterdir()) if folder.exists() else []
        self.counts.in_save += any((path / MARKER).exists() for path in found)
        for path in (folder / found.name for found in complete(folder_at(folder))):
            _compare(path, self._whole / "checkpoints" / path.name)
        newest = latest(folder)
        step = 0 if newest is None else int(newest.name.removeprefix("step-"))
        assert step >= reached, f"step {reached} was saved, but the last checkpoint is {step}"
        self.counts.saved.add(step)
        return step

    def _check_end(self, directory: Path) -> None:
        assert self._check(directory, self._steps) == self._steps
        mine, theirs = (_losses(run / "metrics.jsonl") for run in (directory, self._whole))
        assert mine == theirs, f"{mine}\nare not\n{theirs}"

    def _start(self, directory: Path, *options: str) -> Attempt:
        settings = [f"run.directory={directory}", *options]
        words = [word for setting in settings for word in ("--set", setting)]
        log = directory.with_suffix(".log")
        return Attempt(["train", str(self._config), *words], self._num_ranks, log)


def _run_rank(
    rank: int, num_ranks: int, port: int, arguments: list[str], log: Path, others: list[int]
) -> None:
    """Run a rank in a forked process; never returns."""
    code = 1
    try:
        os.setpgid(0, others[0] if others else 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        where = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (place | where).items()})
        code = command_line(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _compare(path: Path, whole: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        same = (path / name).read_bytes() == (whole / name).read_bytes()
        assert same, f"{path / name}: not the bytes of the undisturbed run"


def _losses(metrics: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def _wait(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not ready():
        assert time.monotonic() < end, "the run makes no progress"
        time.sleep(0.005)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    """Parse the command line, run and print the counts."""
    assert shardwise.train.run
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.ranks, options.seed, options.steps)
        counts = soak.run(options.kills)
    sys.stdout.write(
        f"{counts.kills} kills of {counts.runs} runs of {options.steps} steps on {options.ranks} "
        f"ranks in {time.monotonic() - began:.0f} s: {counts.in_start} while starting, "
        f"{counts.in_save} during a save; checkpoints of {len(counts.saved)} different steps were "
        "compared, all have the bytes of an undisturbed run, and none was lost\n"
    )


if __name__ == "__main__":
    main()
