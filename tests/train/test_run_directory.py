"""Run directories: created, resumed and overwritten."""

import errno
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from shardwise.errors import ConfigError
from shardwise.train import run_directory
from shardwise.train.claim import JOB_FILE
from shardwise.train.config import CheckpointConfig, Config, read_config
from shardwise.train.run_directory import RunDirectory, open_run
from shardwise.train.sinks import JsonLines, StepMetrics, read_history
from tests.train.claimant import hold_in_process


def in_directory(path: Path, *, overwrite: bool = False) -> Config:
    return Config.model_validate({"run": {"directory": str(path), "overwrite": overwrite}})


def test_the_written_configuration_reads_back(tmp_path: Path) -> None:
    config = in_directory(tmp_path / "a" / "b")
    assert read_config(open_run(config).config) == config


def test_the_directory_of_checkpoints_does_not_depend_on_where_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, place in (("here", tmp_path / "here"), ("~/there", tmp_path / "home" / "there")):
        checkpoint = CheckpointConfig(directory=given)
        run = open_run(in_directory(tmp_path / given).model_copy(update={"checkpoint": checkpoint}))
        assert run.saves_to == read_config(run.config).checkpoint.directory == str(place)
    assert open_run(read_config(None, ["checkpoint.directory=memory://a"])).saves_to == "memory://a"


def test_replicas_do_not_share_checkpoints(tmp_path: Path) -> None:
    """Also those that were started by hand; a replica that is resumed finds its own."""
    for number in range(2):
        config = Config.model_validate(
            {
                "run": {"directory": str(tmp_path / f"run-{number}")},
                "checkpoint": {"directory": "memory://a/"},
                "replicas": {"lighthouse": "http://a:1", "count": 2, "number": number},
            }
        )
        run = open_run(config)
        assert run.saves_to == open_run(read_config(run.config)).saves_to == f"memory://a/{number}"
        assert run.saves_best_to == f"memory://a/{number}-best"


def test_runs_that_start_in_the_same_second_have_their_own_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {open_run(Config()).path for _ in range(3)}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {Path("runs")}
    assert all(path.name.startswith("stdlib-") for path in paths)


def test_files_are_overwritten_only_on_request(tmp_path: Path) -> None:
    without = CheckpointConfig(every=0)
    first = in_directory(tmp_path).model_copy(update={"checkpoint": without})
    run = open_run(first)
    run.metrics.write_text("precious", encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"already has files, .* run\.overwrite=true"):
        open_run(in_directory(tmp_path))
    assert run.metrics.read_text(encoding="utf-8") == "precious"
    open_run(in_directory(tmp_path, overwrite=True))
    assert run.metrics.read_text(encoding="utf-8") == ""
    assert (tmp_path / "notes.txt").exists()


def test_a_restart_before_the_first_checkpoint(tmp_path: Path) -> None:
    config = in_directory(tmp_path)
    open_run(config).checkpoints.rmdir()
    with pytest.raises(ConfigError, match="no checkpoints to resume from"):
        open_run(config)
    assert open_run(config, is_restart=True).checkpoint is None
    assert open_run(config).step == 0, "killed before its first checkpoint"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        open_run(in_directory(file / "run"))
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        open_run(in_directory(file))


def test_steps_without_a_gradient_norm_are_in_the_history(tmp_path: Path) -> None:
    """A run with memory.step_in_backward that is resumed has such steps."""
    records = (
        StepMetrics(1, 5.5, None, 1e-3, 100, 1000.0, 0.1),
        StepMetrics(2, 5.25, 0.9, 1e-3, 1, 1.0, 1.0),
    )
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for record in records:
        sink.log(record)
    sink.close()
    assert read_history(tmp_path / "metrics.jsonl", 2) == records
    assert read_history(tmp_path / "metrics.jsonl", 1) == records[:1]


def test_an_overwritten_directory_keeps_what_is_not_of_the_run(tmp_path: Path) -> None:
    for name in ("tensor-1/recording/rank-0.jsonl", "tensor-1/notes", "tensor-data/part-0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    open_run(in_directory(tmp_path, overwrite=True))
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.glob("tensor-*/*")}
    assert left == {"tensor-1/notes", "tensor-data/part-0"}


def test_a_store_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path / "file" / "a", "Not a directory"), ("a0://a", "not known")):
        config = in_directory(tmp_path / "run").model_copy(
            update={"checkpoint": CheckpointConfig(directory=str(place))}
        )
        with pytest.raises(ConfigError, match=f"^checkpoint.directory: .*{reason}"):
            open_run(config)
    place = tmp_path / "new"
    checkpoint = CheckpointConfig(directory=str(place))
    open_run(in_directory(tmp_path / "run").model_copy(update={"checkpoint": checkpoint}))
    assert list(place.iterdir()) == []


def test_two_runs_cannot_save_in_one_directory_at_a_time(tmp_path: Path) -> None:
    """The second would discard the checkpoints of the first, or resume from them."""

    store = tmp_path / "store"
    store.mkdir()
    process = hold_in_process(store)
    checkpoint = CheckpointConfig(directory=str(store))
    config = in_directory(tmp_path / "run").model_copy(update={"checkpoint": checkpoint})
    message = rf"checkpoint\.directory: {store} is in use by process {process} "
    with ExitStack() as held, pytest.raises(ConfigError, match=message):
        open_run(config, held=held)
    os.kill(process, signal.SIGKILL)
    while psutil.pid_exists(process):
        time.sleep(0.01)
    with ExitStack() as held:
        open_run(config, held=held)
        assert (store / JOB_FILE).exists()


def test_a_job_that_slurm_queues_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with run.overwrite=true, which is meant for the first time."""

    def find(run: RunDirectory, _config: Config) -> RunDirectory:
        found.append(run)
        return run

    def resumes(restarts: str) -> bool:
        found.clear()
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with ExitStack() as held:
            open_run(in_directory(tmp_path, overwrite=True), held=held)
        return bool(found)

    found: list[RunDirectory] = []
    monkeypatch.setattr(run_directory, "_resume", find)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert [resumes(restarts) for restarts in ("0", "0", "1", "1")] == [False, False, True, False]


def test_a_finished_run_may_be_in_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "job.json"))

    config, held = in_directory(tmp_path), ExitStack()
    done = open_run(config)
    monkeypatch.setattr(run_directory, "claimed", refuse)
    with pytest.raises(ConfigError, match=r"job\.json cannot be written: Permission denied"):
        open_run(config, held=held)
    done = replace(done, step=config.train.steps)
    monkeypatch.setattr(run_directory, "_resume", lambda *_: done)
    assert open_run(config, held=held) == done
