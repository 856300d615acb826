"""``python -m tests.replicas.soak --kills 100``: kill replicas at random moments, again and again.

Replicas train with `sw.elastic` in float64 and save checkpoints. One after the other is killed at a
random moment, all its ranks at once or one before the other, and started again. The others must
train every step, and the killed one must come back. At the end, all steps of all replicas must have
the same bits, and equal one process that saw the samples of the steps that count; so must the last
complete checkpoint of each replica at its death.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.directory import MARKER, latest
from shardwise.checkpoint.manifest import MANIFEST
from tests.replicas.job import Job, Replica
from tests.replicas.training import (
    assert_equal_to_one_process,
    program,
    saved_in,
    saves_of,
)

SAVE_EVERY = 3  # steps
STEPS_BETWEEN = 5  # that another replica trains after a kill, at least
LONGEST_SECONDS = 1.0  # from a state in which all replicas train to a kill


@dataclass
class Counts:
    """What has been killed so far."""

    kills: int = 0
    single_ranks: int = 0  # kills of one rank, and of the other one later, as by a launcher
    in_save: int = 0  # kills that left an unfinished checkpoint
    steps: int = 0
    checkpoints: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)


class Soak:
    """Replicas of two ranks that are killed in turn."""

    def __init__(self, job: Job, num_replicas: int, seed: int) -> None:
        self.counts = Counts()
        self._job = job
        self._random = random.Random(seed)
        self._numbers = range(num_replicas)
        self._options: dict[str, Any] = {
            "saves": SAVE_EVERY,
            "retention": sw.Retention(last=2),
            "pause": 0.01,
        }
        self._replicas: list[Replica] = job.begin(num_replicas, program, **self._options)

    def run(self, kills: int) -> Counts:
        """Kill ``kills`` times; let all replicas end, and compare."""
        while self.counts.kills < kills:
            self._kill(self.counts.kills % len(self._numbers))
            self.counts.kills += 1
        self._wait_for_all()
        steps = 1 + max(map(self._last_step, self._numbers)) + 20
        self._job.end_after(steps)
        self._job.finish(*self._replicas)
        self.counts.steps = steps
        assert_equal_to_one_process(self._job, steps, self._numbers, self.counts.checkpoints)
        return self.counts

    def _kill(self, number: int) -> None:
        self._wait_for_all()
        replica, is_single = self._replicas[number], self._random.random() < 1 / 4
        before = len(self._job.lines(number, 0, "ready"))
        time.sleep(LONGEST_SECONDS * self._random.random())  # the moment
        if is_single:
            replica.kill_rank(self._random.randrange(len(replica.ranks)))
            time.sleep(LONGEST_SECONDS * self._random.random())
        replica.kill()
        replica.join()
        self.counts.single_ranks += is_single
        self._check_checkpoint(number)
        self._replicas[number] = self._job.start(number, program, **self._options)
        other = (number + 1) % len(self._numbers)
        goal = self._last_step(other) + STEPS_BETWEEN
        self._job.wait_until(lambda: len(self._job.lines(number, 0, "ready")) > before)
        self._job.wait_until(lambda: self._last_step(other) >= goal)

    def _check_checkpoint(self, number: int) -> None:
        folder = saves_of(self._job.folder, number)
        found = list(folder.iterdir()) if folder.exists() else []
        unfinished = [f for f in found if (f / MARKER).exists() and not (f / MANIFEST).exists()]
        self.counts.in_save += bool(unfinished)
        newest = latest(folder)
        if newest is not None:
            self.counts.checkpoints.append(saved_in(newest))

    def _wait_for_all(self) -> None:
        """Wait until all replicas train."""
        at = max(map(self._last_step, self._numbers)) + 1
        for number in self._numbers:
            self._job.wait_until(partial(self._has_reached, number, at))

    def _has_reached(self, number: int, step: int) -> bool:
        return self._last_step(number) >= step

    def _last_step(self, number: int) -> int:
        return max((line["step"] for line in self._job.lines(number, 0, "step")), default=-1)


def run(kills: int, num_replicas: int, seed: int) -> Counts:
    """Kill replicas of two ranks ``kills`` times."""
    with Job(num_ranks=2, min_replicas=1) as job:
        return Soak(job, num_replicas, seed).run(kills)


def main() -> None:
    """Parse the command line, run and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.replicas.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for num_replicas in options.replicas:
        began = time.monotonic()
        counts = run(options.kills, num_replicas, options.seed)
        sys.stdout.write(
            f"{num_replicas} x 2 ranks, seed {options.seed}: {counts.kills} kills in "
            f"{counts.steps} steps and {time.monotonic() - began:.0f} s, {counts.single_ranks} "
            f"rank by rank, {counts.in_save} in a save; the bits of all replicas are the same, and "
            f"their values and those of {len(counts.checkpoints)} checkpoints equal one process\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
