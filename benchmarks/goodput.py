"""``python -m benchmarks.goodput``: a run with a kill every 60 s, as replicas and with checkpoints.

`shardwise train` trains a small model on two ranks in three ways: as two replicas of one rank that
average each gradient or train alone for ``--local`` steps, of which the one that has lived longest
is killed every ``--period`` seconds and comes back, and as one job of two ranks that is killed as a
whole and resumed at once from its last checkpoint (a rank that dies ends its job). Nobody waits for
new machines.

Goodput is counted in two ways. By time: the duration of each step that stays, without what the loss
of a replica has added to it, times the share of the ranks whose samples count in it, over the whole
time. By steps: the mean of that share over the steps that stay (for checkpoints: the share of the
steps that were not trained again); it does not see how long anybody waits.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shardwise.checkpoint.directory import latest

RESULTS = Path(__file__).parent / "results" / "goodput.json"
NUM_RANKS = 2
GLOBAL_BATCH, CONTEXT = 8, 64
TOKENS = GLOBAL_BATCH * CONTEXT  # of a step of both ranks
SETTINGS = {
    "train.steps": 1_000_000,
    "train.global_batch": GLOBAL_BATCH,
    "train.validation_batches": 1,
    "model.layers": 2,
    "model.width": 128,
    "model.context": CONTEXT,
    "sample.bytes": 0,
    "record.enabled": "false",
}


def main() -> None:
    """Run all, and write and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=330.0, help="of each run")
    parser.add_argument("--period", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--local", type=int, default=16, help="local steps of a fragment")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    settings = {key: value for key, value in vars(options).items() if key != "runs"}
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = {run: before[run] for run in RUNS if _is_comparable(before.get(run, {}), settings)}
    for run in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            found[run] = {**settings, **_run(options, Path(folder) / run, *RUNS[run])}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))  # noqa: T201


def _is_comparable(result: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a result of an earlier call has the same definition and ``settings``."""
    return "goodput_by_time" in result and settings.items() <= result.items()


def _run(
    options: Namespace,
    directory: Path,
    settings: Callable[[Namespace], list[str]],
    kill: Callable[[psutil.Process], None],
) -> dict[str, Any]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [f"{key}={value}" for key, value in SETTINGS.items()]
    words += [f"run.directory={directory}"]
    sets = [word for setting in words for word in ("--set", setting)]
    command = [sys.executable, "-m", "shardwise", "train", *sets, *settings(options)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    process = start()
    while max((record["step"] for record in _records(directory)), default=0) < 2 * options.every:
        time.sleep(0.2)
    began, kills, repeated = time.time(), 0, 0
    first = {(r["life"], r["step"]) for r in _records(directory)}
    while time.time() - began < options.seconds:
        time.sleep(0.2)
        if time.time() - began > (kills + 1) * options.period and kills < _kills(options):
            kill(psutil.Process(process.pid))
            kills += 1
            if process.poll() is not None:
                repeated += _steps_lost(directory)
                process = start()
    seconds = time.time() - began
    records = [r for r in _records(directory) if (r["life"], r["step"]) not in first]
    _kill_all(psutil.Process(process.pid))
    kept = {r["step"]: r for r in records}
    ahead = options.local if settings is _local else 0
    # The steps of a replica that dies before its next round do not count.
    shares = {step: _share(kept.get(step + ahead, record)) for step, record in kept.items()}
    useful = sum(_useful_seconds(record) * shares[step] for step, record in kept.items())
    return {
        "measured_seconds": seconds,
        "kills": kills,
        "steps": len(kept),
        "goodput_by_time": useful / seconds,
        "goodput_by_steps": sum(shares.values()) / (len(kept) + repeated),
        "waited_seconds": sum(float(r.get("waited_seconds", 0.0)) for r in kept.values()),
        "sequences_per_second": sum(GLOBAL_BATCH * share for share in shares.values()) / seconds,
    }


def _kills(options: Namespace) -> int:
    """As many as let the last one come back."""
    return int(options.seconds / options.period - 0.25)


def _records(directory: Path) -> Iterator[dict[str, Any]]:
    """The metrics of the steps of all lives of a run, in the order of their lives."""
    paths = directory.parent.glob(f"{directory.name}/**/metrics.jsonl")
    for path in sorted(paths, key=lambda path: path.stat().st_ctime):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield {"life": path.parent.name, **json.loads(line)}


def _steps_lost(directory: Path) -> int:
    """The steps of a job that was killed since its last checkpoint, which it trains again."""
    last = max(int(record["step"]) for record in _records(directory))
    saved = latest(directory / "checkpoints")
    return last - int(saved.name.rpartition("-")[2]) if saved else last


def _share(record: dict[str, Any]) -> float:
    return float(record.get("replicas", NUM_RANKS)) / NUM_RANKS


def _useful_seconds(record: dict[str, Any]) -> float:
    seconds = TOKENS * _share(record) / float(record["tokens_per_second"])
    return max(0.0, seconds - float(record.get("lost_seconds", 0.0)))


def _replicas(options: Namespace) -> list[str]:
    del options
    return ["--replicas", str(NUM_RANKS), "--nproc", "1", "--set", "checkpoint.every=0"]


def _local(options: Namespace) -> list[str]:
    keys = {"every": options.local, "fragments": 2, "delay": 1}
    sets = [f"outer.{key}={value}" for key, value in keys.items()]
    return [*_replicas(options), *(word for one in sets for word in ("--set", one))]


def _checkpoints(options: Namespace) -> list[str]:
    return ["--nproc", str(NUM_RANKS), "--set", f"checkpoint.every={options.every}"]


def _kill_oldest(job: psutil.Process) -> None:
    """Kill the replica that has lived longest."""
    children = [one for one in job.children() if "spawn_main" in " ".join(one.cmdline())]
    _kill(min(children, key=lambda process: process.create_time()))


def _kill_all(job: psutil.Process) -> None:
    _kill(job)
    job.wait()


def _kill(process: psutil.Process) -> None:
    for one in (*process.children(recursive=True), process):
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


RUNS = {
    "replicas": (_replicas, _kill_oldest),
    "local steps": (_local, _kill_oldest),
    "checkpoints": (_checkpoints, _kill_all),
}


if __name__ == "__main__":
    main()
