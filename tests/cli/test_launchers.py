"""Launchers on several machines, which are simulated by several addresses of this one."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .commands import PATIENCE_SECONDS, Command, environment, losses


def free_port() -> int:
    """Return a free port in the range that `shardwise.launch` uses for SLURM jobs."""
    for port in range(20000, 40000):
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.2", port)):
                return port
    raise AssertionError("no port is free")


def start_slurm(arguments: list[str | Path], cwd: Path) -> list[Command]:
    """Start the tasks of a step on two machines, as `srun` does."""
    job = str(free_port() - 20000)
    return [
        Command(
            arguments,
            cwd,
            SLURM_JOB_ID=job,
            SLURM_STEP_NODELIST="127.0.0.[2-3]",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID="0",
        )
        for rank in range(2)
    ]


@pytest.mark.thorough
def test_a_job_of_slurm_is_stopped_and_requeued(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments: list[str | Path] = ["train", tiny, "--set", f"run.directory={directory}"]
    arguments += ["--set", "train.steps=60", "--set", "sample.bytes=0"]
    metrics = directory / "metrics.jsonl"
    first, second = start_slurm(arguments, tmp_path)
    first.wait_for(lambda: metrics.exists() and metrics.read_text("utf-8").count("\n") > 2)
    for command in (first, second):
        command.send(signal.SIGUSR1)
    assert [command.finish().code for command in (first, second)] == [128 + signal.SIGUSR1] * 2
    done = len(losses(directory))
    assert 2 < done < 60
    finished = [command.finish() for command in start_slurm(arguments, tmp_path)]
    assert [one.code for one in finished] == [0, 0], finished
    assert f"resuming after step {done}" in finished[0].stdout
    assert len(losses(directory)) == 60


@pytest.mark.thorough
def test_torchrun_on_two_machines(tiny: Path, tmp_path: Path) -> None:
    """One torchrun per machine, as on Kubernetes."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.2", f"--master-port={port}"),
                *("--local-addr", f"127.0.0.{2 + node}", "-m", "shardwise", "train", str(tiny)),
                *("--set", f"run.directory={tmp_path / 'run'}", "--set", "train.steps=10"),
            ],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert len(summary["resident_peaks"]) == 2
