"""Runs that are stopped and resumed: the same bits on the same number of ranks."""

import json
import os
import shutil
import signal
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.directory import latest
from shardwise.errors import ConfigError
from shardwise.train.config import Config, read_config
from shardwise.train.loop import train
from shardwise.train.run_directory import RunDirectory, open_run
from shardwise.train.sinks import JsonLines, Sink, StepMetrics
from tests.covering import leaving
from tests.ranks import run_on
from tests.train.running import cpu_world

STEPS = 8


@dataclass(frozen=True)
class Case:
    """A run of the trainer on the ranks of a pool."""

    directory: Path
    num_ranks: int = 2
    every: int = 3
    wait: bool = True
    overwrite: bool = False
    steps: int = STEPS
    seed: int = 0
    optimizer: str = "adamw"
    layers: int = 2
    glob: str = "*.py"
    store: str = ""

    @property
    def config(self) -> Config:
        text = Path(sysconfig.get_path("stdlib")) / "json"
        return Config.model_validate(
            {
                "run": {"directory": str(self.directory), "overwrite": self.overwrite},
                "model": {"layers": self.layers, "heads": 2, "width": 16, "context": 16},
                "data": {"path": str(text), "glob": self.glob},
                "train": {
                    "steps": self.steps,
                    "global_batch": 4,
                    "warmup_share": 0.1,
                    "validation_batches": 1,
                    "seed": self.seed,
                    "optimizer": self.optimizer,
                },
                "checkpoint": {
                    "every": self.every,
                    "keep": 10,
                    "wait": self.wait,
                    "directory": self.store,
                },
                "sample": {"bytes": 0},
                "shard": {"nproc": self.num_ranks},
            }
        )

    def run(self, **events: int) -> list["Outcome"]:
        return run_on(self.num_ranks, run_case, self, events)


@dataclass(frozen=True)
class Outcome:
    """How the run ended on one rank."""

    stopped_by: int
    random: list[int]  # drawn from torch's generator after the end


class Events:
    """A sink that draws random numbers after each step, and sends a signal after one."""

    def __init__(self, rank: int, events: dict[str, int]) -> None:
        self._rank = rank
        self._events = events

    def log(self, record: StepMetrics) -> None:
        torch.rand(3)  # as a model with dropout would
        is_signalled = self._events.get("rank") in (self._rank, None)
        if is_signalled and record.step == self._events.get("signal_after"):
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def run_case(case: Case, events: dict[str, int]) -> Outcome:
    world = cpu_world()
    torch.manual_seed(world.rank)
    run: RunDirectory = world.on_first(lambda: open_run(case.config))
    if run.is_finished(case.config.train):
        return Outcome(0, [])
    sinks: list[Sink] = [Events(world.rank, events)]
    if world.is_first:
        sinks.append(JsonLines(run.metrics))
    result = train(case.config, world, run, sinks)
    for sink in sinks:
        sink.close()
    if world.is_first and result.summary is not None:
        run.summary.write_text(json.dumps(asdict(result.summary)), encoding="utf-8")
    return Outcome(result.stopped_by, torch.randint(1 << 40, (4,)).tolist())


def content(directory: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors."""
    path = latest(directory / "checkpoints")
    assert path is not None
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def losses(directory: Path) -> dict[int, float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return {record["step"]: record["loss"] for record in records}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, list[Outcome]]:
    """An undisturbed run."""
    case = Case(tmp_path_factory.mktemp("whole"), overwrite=True)
    return case, case.run()


Whole = tuple[Case, list[Outcome]]


def test_checkpoints_are_periodic_and_at_the_end(whole: Whole) -> None:
    assert names(whole[0].directory) == ["step-00000003", "step-00000006", "step-00000008"]
    assert [outcome.stopped_by for outcome in whole[1]] == [0, 0]


@pytest.mark.parametrize("wait", leaving([True], [False, True]))
def test_a_signal_on_one_rank_stops_all_and_the_run_is_resumed(
    whole: Whole, tmp_path: Path, wait: bool
) -> None:
    case = Case(tmp_path / "run", wait=wait)
    stopped = case.run(rank=1, signal_after=4)
    assert [outcome.stopped_by for outcome in stopped] == [signal.SIGTERM] * 2
    # The ranks exchange the signal in the next step.
    assert names(case.directory) == ["step-00000003", "step-00000005"]
    assert len(losses(case.directory)) == 5
    outcomes = case.run()
    assert outcomes == whole[1], "the random states are not those of an undisturbed run"
    assert content(case.directory) == content(whole[0].directory)
    assert losses(case.directory) == losses(whole[0].directory)


@pytest.mark.parametrize("num_ranks", leaving([4], [1, 4]))
def test_a_killed_run_is_resumed_on_another_number_of_ranks(
    whole: Whole, tmp_path: Path, num_ranks: int
) -> None:
    case = replace(whole[0], directory=tmp_path / "run", num_ranks=num_ranks, overwrite=False)
    shutil.copytree(whole[0].directory, case.directory)
    for step in (6, 8):  # as if killed before these, and while writing a line
        shutil.rmtree(case.directory / "checkpoints" / f"step-{step:08}")
    with (case.directory / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 9, "lo')
    case.run()
    mine, theirs = losses(case.directory), losses(whole[0].directory)
    assert [mine[step] for step in (1, 2, 3)] == [theirs[step] for step in (1, 2, 3)]
    assert mine == pytest.approx(theirs, abs=1e-5)
    assert names(case.directory) == names(whole[0].directory)


def test_a_run_killed_before_its_summary_only_summarizes(whole: Whole, tmp_path: Path) -> None:
    case = replace(whole[0], directory=tmp_path / "run", overwrite=False)
    shutil.copytree(whole[0].directory, case.directory)
    (case.directory / "summary.json").unlink()
    case.run()
    assert (case.directory / "summary.json").exists()
    assert content(case.directory) == content(whole[0].directory)
    assert losses(case.directory) == losses(whole[0].directory)


def test_resuming_from_the_written_configuration_keeps_the_checkpoints(
    whole: Whole, tmp_path: Path
) -> None:
    """The command that a stopped run prints resumes it, even after ``run.overwrite=true``."""
    shutil.copytree(whole[0].directory, tmp_path / "run")
    written = tmp_path / "run" / "config.toml"
    run = open_run(read_config(written, [f"run.directory={tmp_path}/run", "train.steps=10"]))
    assert run.step == STEPS
    assert names(run.path) == names(whole[0].directory)


def test_a_store_with_a_finished_run_leaves_nothing_to_train(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    Case(tmp_path / "one", store=store).run()
    second = Case(tmp_path / "two", store=store)
    second.run()
    run = open_run(second.config)
    assert run.is_finished(second.config.train)
    assert not run.config.exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": 3}, r"model\.layers=3 differs from that of .*step-00000008, which has 2"),
        ({"seed": 7}, r"train\.seed=7 differs .*, which has 0"),
        ({"optimizer": "sgd"}, r"train\.optimizer=torch.optim:SGD differs .*AdamW"),
        ({"glob": "d*.py"}, r"data: the text differs from that of"),
        ({"steps": 7}, r"train\.steps=7: .* is from a later step"),
    ],
)
def test_a_checkpoint_of_another_run_is_rejected(
    whole: Whole, change: dict[str, object], complaint: str
) -> None:
    before = sorted(path.stat().st_mtime_ns for path in whole[0].directory.rglob("*"))
    with pytest.raises(ConfigError, match=complaint) as refused:
        open_run(replace(whole[0], overwrite=False, **change).config)  # type: ignore[arg-type]
    assert "run.overwrite=true" in str(refused.value)
    assert before == sorted(path.stat().st_mtime_ns for path in whole[0].directory.rglob("*"))


def test_a_run_is_resumed_from_a_store_in_another_directory(whole: Whole, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store/checkpoints"
    Case(tmp_path / "one", store=store).run(signal_after=4)
    Case(tmp_path / "two", store=store).run()
    assert names(tmp_path / "one") == names(tmp_path / "two") == []
    first, *_ = (tmp_path / "two" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["step"] > 4, "it started over"
    assert content(tmp_path / "store") == content(whole[0].directory)


def test_steps_and_ranks_may_change(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    case = replace(whole[0], directory=tmp_path / "run", overwrite=False, steps=10, num_ranks=4)
    run = open_run(case.config)
    assert run.step == STEPS
    assert len(run.history) == STEPS


def test_a_resumed_run_keeps_the_changes_of_replicas(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    *lines, last = metrics.read_text(encoding="utf-8").splitlines()
    change = {"left": [1], "joined": [0, 2], "repeats": 1, "lost_seconds": 2.5}
    lines.append(json.dumps(json.loads(last) | change))
    metrics.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    case = replace(whole[0], directory=tmp_path / "run", overwrite=False, steps=STEPS + 1)
    open_run(case.config)
    kept = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert kept == [json.loads(line) for line in lines]


def test_a_checkpoint_of_another_program_is_rejected(tmp_path: Path) -> None:
    sw.save(tmp_path / "checkpoints" / "step-5", model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"step-5: was not saved by `shardwise train`"):
        open_run(Case(tmp_path).config)


def test_starting_over_removes_the_checkpoints(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    run = open_run(replace(whole[0], directory=tmp_path / "run", layers=3).config)
    assert (run.step, run.checkpoint, names(run.path)) == (0, None, [])
