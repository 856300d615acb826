"""Early stopping, the best checkpoint, and callbacks."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.directory import latest
from shardwise.train.config import Config
from shardwise.train.loop import train
from shardwise.train.run_directory import open_run
from shardwise.train.sinks import JsonLines, StepMetrics, read_history
from shardwise.train.trainer import Trainer
from tests.ranks import run_on
from tests.train.running import Document, config_with, cpu_world

LOSSES = [5.0, 3.0, 4.0, 3.5, 3.2, 3.1, 2.0]  # validation losses, every two steps


class EndAt3:
    """A callback that ends the run, on every rank."""

    def __init__(self, _config: Config, _directory: Path) -> None:
        self.steps: list[int] = []

    def __call__(self, trainer: Trainer, record: StepMetrics) -> None:
        self.steps.append(record.step)
        trainer.ends_early = self.steps == [1, 2, 3]


def config_of(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    (tmp_path / "text").write_text("def f(x):\n    return x\n" * 100)
    document: Document = {
        "run": {"directory": str(tmp_path / "run")},
        "model": {"layers": 2, "heads": 2, "width": 16, "context": 16},
        "data": {"path": str(tmp_path / "text")},
        "train": {"steps": 20, "global_batch": 2, "validate_every": 2},
        "sample": {"bytes": 0},
        "checkpoint": {"every": 4, "best": True},
        "record": {"enabled": False},
    }
    return config_with(document, sections).with_ranks(2)


def _train(config: Config) -> tuple[list[Path], bool]:
    losses = iter(LOSSES)
    world = cpu_world()
    run = world.on_first(lambda: open_run(config))
    first = run.step // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_validate", lambda _self: next(losses))
        for _ in range(first):
            next(losses)
        result = train(config, world, run, [JsonLines(run.metrics)] if world.is_first else [])
    places = run.saves_to, run.saves_best_to
    return [Path(str(latest(place))) for place in places], result.summary is not None


def _die_in_the_last_save(config: Config) -> None:
    def save(trainer: Trainer, path: Path, **options: Any) -> Any:
        if trainer.is_done and path.parent.name == "checkpoints":
            raise KeyboardInterrupt
        return original(trainer, path, **options)

    original = Trainer.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "save", save)
        with pytest.raises(KeyboardInterrupt):
            _train(config)


def names_of(config: Config) -> list[str]:
    [(checkpoints, is_summarized), _] = run_on(2, _train, config)
    assert is_summarized
    return [path.name for path in checkpoints]


def test_training_stops_when_the_loss_falls_no_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, train={"patience": 3})
    assert names_of(config) == ["step-00000010", "step-00000004"]


def test_patience_outlasts_a_resume(tmp_path: Path) -> None:
    stopped = config_of(tmp_path, train={"steps": 6, "patience": 3})
    assert names_of(stopped) == ["step-00000006", "step-00000004"]
    config = config_of(tmp_path, train={"patience": 3})
    assert names_of(config) == ["step-00000010", "step-00000004"]


def test_the_best_checkpoint_outlasts_a_kill(tmp_path: Path) -> None:
    """The run resumes from step 3, and saves that of step 4 again."""
    config = config_of(tmp_path, train={"steps": 4}, checkpoint={"every": 3})
    run_on(2, _die_in_the_last_save, config)
    assert [path.name for path in (tmp_path / "run" / "best").iterdir()] == ["step-00000004"]
    assert names_of(config) == ["step-00000004", "step-00000004"]


def test_a_callback_ends_a_run_that_is_validated_once_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, run={"callbacks": ["tests.train.test_ending:EndAt3"]})
    assert names_of(config) == ["step-00000003", "step-00000003"]
    records = read_history(tmp_path / "run" / "metrics.jsonl", 3)
    assert [record.validation_loss for record in records] == [None, *LOSSES[:2]]


def test_a_run_with_no_step_left_is_validated(tmp_path: Path) -> None:
    """It is resumed with as many steps as its checkpoint has, which was not validated."""
    options = {"train": {"steps": 4}, "checkpoint": {"every": 3}}
    run_on(2, _die_in_the_last_save, config_of(tmp_path, **options))
    config = config_of(tmp_path, **options | {"train": {"steps": 3}})
    assert names_of(config) == ["step-00000003", "step-00000003"]


def test_a_run_without_progress_is_finished_also_in_another_directory(tmp_path: Path) -> None:
    checkpoint = {"directory": str(tmp_path / "store")}
    config = config_of(tmp_path, train={"patience": 3}, checkpoint=checkpoint)
    names_of(config)
    moved = config_with(config.model_dump(), {"run": {"directory": str(tmp_path / "other")}})
    assert open_run(moved).is_finished(moved.train)
    patient = config_with(moved.model_dump(), {"train": {"patience": 4}})
    assert not open_run(patient).is_finished(patient.train)
