"""Metrics reach their sinks."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.errors import ConfigError
from shardwise.train import run_directory
from shardwise.train.config import Config
from shardwise.train.display import draw_losses
from shardwise.train.run_directory import open_run
from shardwise.train.sinks import (
    JsonLines,
    StepMetrics,
    check_trackers,
    open_trackers,
)

FIRST = StepMetrics(1, 5.5, 0.9, 1e-3, 100, 1000.0, 0.1)
SECOND = StepMetrics(2, 5.25, 0.8, 1e-3, 200, 1000.0, 0.2, validation_loss=5.0)


def with_sinks(*names: str) -> Config:
    return Config.model_validate({"run": {"sinks": names}})


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.log(FIRST)
    sink.log(SECOND)
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    sink.close()
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


def test_tensorboard_has_a_scalar_for_each_metric(tmp_path: Path) -> None:
    [sink] = open_trackers(with_sinks("tensorboard"), tmp_path)
    sink.log(FIRST)
    sink.log(SECOND)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [(event.step, event.value) for event in losses] == [(1, 5.5), (2, 5.25)]
    [validation] = events.Scalars("validation_loss")
    assert (validation.step, validation.value) == (2, 5.0)


def test_wandb_gets_the_configuration_and_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics["loss"])),
        finish=lambda: calls.append("finish"),
    )

    def init(**options: Any) -> SimpleNamespace:
        calls.append((options["name"], options["config"]["train"]["steps"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = with_sinks("wandb")
    [sink] = open_trackers(config, tmp_path)
    sink.log(FIRST)
    sink.close()
    assert calls == [("stdlib", config.train.steps), (1, 5.5), "finish"]


class Own:
    """A user's sink."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.made_of = config, directory


@pytest.mark.thorough
def test_the_real_wandb_writes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: too large for CI")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = with_sinks("wandb")
    check_trackers(config)
    [sink] = open_trackers(config, tmp_path)
    sink.log(FIRST)
    sink.log(SECOND)
    sink.close()
    wandb.teardown()  # as at the end of the process
    [written] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = written.read_bytes()
    assert [name in content for name in (b"validation_loss", b"global_batch")] == [True, True]


def test_a_sink_has_a_dotted_name(tmp_path: Path) -> None:
    config = with_sinks("tests.train.test_sinks:Own")
    check_trackers(config)
    [sink] = open_trackers(config, tmp_path)
    assert sink.__dict__ == {"made_of": (config, tmp_path)}


def test_a_sink_is_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardwise.sinks]\nown = tests.train.test_sinks:Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    [sink] = open_trackers(with_sinks("own"), tmp_path)
    assert type(sink).__name__ == "Own"


def test_an_unknown_sink_is_named() -> None:
    with pytest.raises(ConfigError, match=r"run.sinks='tensorbord' is not known; did you mean"):
        check_trackers(with_sinks("tensorbord"))


@pytest.mark.parametrize("validation_loss", [None, 5.0])
def test_the_plot_is_a_png(tmp_path: Path, validation_loss: float | None) -> None:
    path = tmp_path / "loss.png"
    second = StepMetrics(2, 5.0, 0.9, 1e-3, 200, 1000.0, 0.2, validation_loss)
    draw_losses(path, "a run", [FIRST, second])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_resumed_run_shows_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    """The steps after the checkpoint, and those of a run that was overwritten, are gone."""

    def train(*records: StepMetrics) -> None:
        [sink] = open_trackers(with_sinks("tensorboard"), tmp_path)
        for record in records:
            sink.log(record)
        sink.close()
        time.sleep(1.1)  # the names of files have the second in which they were made

    kept = tmp_path / "metrics.jsonl"
    train(FIRST, SECOND, replace(FIRST, step=3))  # killed after a checkpoint of step 1
    kept.write_text(json.dumps(FIRST.known()) + "\n")
    train(replace(SECOND, loss=4.0))
    assert _losses_in(tmp_path / "tensorboard") == [(1, 5.5), (2, 4.0)]
    kept.write_text("")  # run.overwrite=true
    train(replace(FIRST, loss=7.0))
    assert _losses_in(tmp_path / "tensorboard") == [(1, 7.0)]


def _losses_in(directory: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_runs_have_their_own_ids_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in directories of one name, such as those of replicas; a resumed one keeps its id."""

    def id_of(name: str, *, overwrite: bool = False) -> str:
        config = Config.model_validate(
            {"run": {"directory": str(tmp_path / name), "overwrite": overwrite, "sinks": ["wandb"]}}
        )
        open_trackers(config, open_run(config).path)
        return ids[-1]

    ids: list[str] = []
    module = SimpleNamespace(init=lambda **options: ids.append(options["id"]))
    monkeypatch.setitem(sys.modules, "wandb", module)
    first = id_of("a/0")
    assert first != id_of("b/0")
    again = id_of("a/0", overwrite=True)
    assert again != first
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "_resume", lambda run, _: replace(run, checkpoint=tmp_path))
        assert id_of("a/0") == again
    (tmp_path / "a" / "0" / "wandb-id").unlink()  # as a run of an older version
    history = (FIRST,)
    monkeypatch.setattr(
        run_directory, "_resume", lambda run, _: replace(run, checkpoint=tmp_path, history=history)
    )
    assert id_of("a/0") == "0"
