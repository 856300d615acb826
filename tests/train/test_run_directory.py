"""Where a run leaves its files."""

import json
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config import CheckpointConfig, Config
from shardwise.train.records import Record
from shardwise.train.run_directory import MetricsFile, open_run
from shardwise.train.settings import read_config


def in_directory(path: Path, *, overwrite: bool = False) -> Config:
    return Config.model_validate({"run": {"directory": str(path), "overwrite": overwrite}})


def test_the_configuration_can_be_run_again(tmp_path: Path) -> None:
    config = in_directory(tmp_path / "a" / "b")
    assert read_config(open_run(config).config) == config


def test_runs_of_one_second_do_not_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {open_run(Config()).path for _ in range(3)}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {Path("runs")}
    assert all(path.name.startswith("stdlib-") for path in paths)


def test_files_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    without = CheckpointConfig(every=0)
    first = in_directory(tmp_path).model_copy(update={"checkpoint": without})
    run = open_run(first)
    run.metrics.write_text("precious", encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"already holds files, .* run\.overwrite=true"):
        open_run(in_directory(tmp_path))
    assert run.metrics.read_text(encoding="utf-8") == "precious"
    open_run(in_directory(tmp_path, overwrite=True))
    assert run.metrics.read_text(encoding="utf-8") == ""
    assert (tmp_path / "notes.txt").exists()


def test_a_launcher_starts_again_in_what_it_left_without_a_checkpoint(tmp_path: Path) -> None:
    config = in_directory(tmp_path)
    open_run(config).checkpoints.rmdir()
    with pytest.raises(ConfigError, match="no checkpoints to go on from"):
        open_run(config)
    assert open_run(config, again=True).checkpoint is None
    assert open_run(config).step == 0, "killed before its first checkpoint"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        open_run(in_directory(file / "run"))
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        open_run(in_directory(file))


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append(Record(1, 5.5, 0.9, 1e-3, 100, 1000.0, 0.1))
    metrics.append(Record(2, 5.25, 0.8, 1e-3, 200, 1000.0, 0.2, validation_loss=5.0))
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    metrics.close()
    assert first == {
        "step": 1,
        "loss": 5.5,
        "grad_norm": 0.9,
        "lr": 1e-3,
        "tokens": 100,
        "tokens_per_second": 1000.0,
        "seconds": 0.1,
    }
    assert second["validation_loss"] == 5.0
