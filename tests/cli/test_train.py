"""`shardwise train`: its output, its files and its exit codes."""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.recording.format import read_recording
from shardwise.train.config import read_config

from .commands import Command, Finished, losses, own_lines, reserved_port, run


@dataclass(frozen=True)
class Run:
    """A run that succeeded."""

    finished: Finished
    directory: Path

    @property
    def summary(self) -> dict[str, object]:
        summary: dict[str, object] = json.loads(
            (self.directory / "summary.json").read_text(encoding="utf-8")
        )
        return summary


def train(tiny: Path, directory: Path, *arguments: str) -> Run:
    finished = run(
        ["train", tiny, "--set", f"run.directory={directory}", *arguments], directory.parent
    )
    assert finished.code == 0, finished.stderr
    return Run(finished, directory)


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny, tmp_path_factory.mktemp("two") / "run")


def test_the_run_directory_has_its_files(two_ranks: Run, tiny: Path) -> None:
    names = {file.name for file in two_ranks.directory.iterdir()}
    assert names == {
        "checkpoints",
        "config.toml",
        "job.json",
        "loss.png",
        "metrics.jsonl",
        "recording",
        "summary.json",
    }
    assert (two_ranks.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    written = read_config(two_ranks.directory / "config.toml")
    assert written == read_config(tiny, [f"run.directory={two_ranks.directory}"])


def test_the_run_is_recorded(two_ranks: Run) -> None:
    for rank in read_recording(two_ranks.directory):
        assert [step.step for step in rank.steps] == list(range(20))
        assert rank.detailed_steps == (3, 4, 5, 6, 7)
        assert Counter(span.name for span in rank.spans) == {
            "data": 20,
            "optimizer": 20,
            "checkpoint": 1,
            "validation": 1,
        }


def test_metrics_have_one_line_per_step(two_ranks: Run) -> None:
    lines = (two_ranks.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["tokens"] for record in records] == [8 * 32 * n for n in range(1, 21)]
    assert all(record["tokens_per_second"] > 0 for record in records)
    assert all(record["grad_norm"] > 0 for record in records)
    assert records[-1]["validation_loss"] == two_ranks.summary["validation_loss"]


def test_the_loss_falls(two_ranks: Run) -> None:
    trained = losses(two_ranks.directory)
    assert 5.3 < trained[0] < 5.8  # ln 256 = 5.55
    assert trained[-1] < trained[0] - 1


def test_plan_progress_and_results_are_printed(two_ranks: Run) -> None:
    shown = two_ranks.finished.stdout
    assert re.search(r"blocks\.0 to blocks\.1 .*2 x 12,352", shown)
    assert re.search(r"a rank \(of 2\) .*one process", shown)
    steps = [line.split()[1] for line in shown.splitlines() if re.match(r"step \d+/", line)]
    assert steps == ["1/20", "5/20", "10/20", "15/20", "20/20"]
    assert re.search(r"training loss \d\.\d+ .* validation loss \d\.\d+", shown)
    assert "def " in shown
    assert re.search(r"\d+% of the gather time overlapped", shown)
    assert f"run directory: {two_ranks.directory}" in shown


def test_nothing_is_printed_to_stderr(two_ranks: Run) -> None:
    assert own_lines(two_ranks.finished.stderr) == []


def test_memory_of_a_rank_is_its_shards_and_its_gathered_units(two_ranks: Run) -> None:
    rank, process = two_ranks.summary["rank"], two_ranks.summary["process"]
    assert isinstance(rank, dict)
    assert isinstance(process, dict)
    for kept in ("parameters", "gradients", "optimizer"):
        assert rank[kept] == process[kept] / 2
    assert process["parameters"] == 4 * 32_928
    root, block = 4 * 8_224, 4 * 12_352
    # The gathered root and blocks, whose memory is kept from forward to backward; and in backward
    # the gradients of both blocks, one of which is being reduced.
    assert rank["transient"] == root + 2 * block + 2 * block


def test_ranks_of_a_launcher_train_the_same_with_micro_batches(
    two_ranks: Run, tiny: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    arguments: list[str | Path] = [
        *("train", tiny, "--set", f"run.directory={directory}"),
        *("--set", "train.micro_batch=2", "--set", "shard.units=Block"),
    ]
    with launcher(num_ranks=2) as launched:
        ranks = [
            Command(arguments, tmp_path, RANK=rank, LOCAL_RANK=rank, **launched) for rank in "01"
        ]
        first, second = (rank.finish() for rank in ranks)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert "run directory:" in first.stdout
    assert second.stdout == ""
    assert losses(directory) == pytest.approx(losses(two_ranks.directory), abs=1e-4)


def test_rank_0_of_a_launcher_reports_an_error_of_another_rank(tiny: Path, tmp_path: Path) -> None:
    paths = ("stdlib", "/no/such/text")
    words = [["train", str(tiny), "--set", f"data.path={path}"] for path in paths]
    with launcher(num_ranks=2) as launched:
        ranks = [Command(words[rank], tmp_path, RANK=str(rank), **launched) for rank in range(2)]
        first, second = (rank.finish() for rank in ranks)
    assert (first.code, second.code) == (2, 2)
    [line] = own_lines(first.stderr)
    assert line == "shardwise: rank 1: data.path='/no/such/text': no such file or directory"
    assert "shardwise:" not in second.stderr
    assert list(tmp_path.iterdir()) == []


@contextmanager
def launcher(num_ranks: int) -> Iterator[dict[str, str]]:
    """The environment variables that a launcher sets on all ranks."""
    with reserved_port() as port:
        yield {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def test_the_traceback_of_a_failed_rank_is_printed(tiny: Path, tmp_path: Path) -> None:
    finished = run(["train", tiny, "--nproc", "1", "--set", "train.lr=1e30"], tmp_path)
    assert finished.code == 1
    lines = own_lines(finished.stderr)
    assert re.fullmatch("shardwise: rank 0 failed:", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    error, advice = lines[-2:]
    assert re.match(r"FloatingPointError: step \d+: loss .*; lower train\.lr", error)
    assert re.search(r"\d+ of \d+ gradients are not finite\. The first in backward: ", error)
    assert advice.startswith("no checkpoint was saved; the metrics so far are in runs/tiny-")
    assert "ChildFailedError" not in finished.stderr, "the launcher's own traceback is not shown"
    assert [line for line in lines if line.startswith("Traceback")] == [lines[1]]


def test_an_interrupt_without_checkpoints_ends_the_run_at_once(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments: list[str | Path] = [
        *("train", tiny, "--set", f"run.directory={directory}"),
        *("--set", "train.steps=100000", "--set", "checkpoint.every=0"),
    ]
    command, metrics = Command(arguments, tmp_path), directory / "metrics.jsonl"
    command.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    os.killpg(command.pid, signal.SIGINT)
    began = time.monotonic()
    finished = command.finish()
    assert time.monotonic() - began < 60, "it waited for the run"
    assert finished.code == 130
    assert finished.stderr.splitlines()[-1] == (
        f"shardwise: interrupted; no checkpoint was saved; the metrics so far are in {directory}"
    )
    assert "Traceback" not in finished.stderr
    assert losses(directory)
