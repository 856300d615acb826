"""``train.reproducible``: a run has the same bits on any number of ranks, by the exported file."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.launch.world import World
from shardwise.train import trainer
from shardwise.train.build import check
from shardwise.train.config import Config
from shardwise.train.loop import steps, train
from shardwise.train.run_directory import RunDirectory
from shardwise.train.trainer import Trainer
from tests.ranks import run_on
from tests.train.running import Document, Recorder, config_with, cpu_world


def _config(tmp_path: Path, *layers: dict[str, Any]) -> Config:
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    document: Document = {
        "model": {"layers": 2, "heads": 2, "width": 64, "context": 16},
        "data": {"path": str(text)},
        "train": {
            "steps": 4,
            "global_batch": 8,
            "reproducible": 8,
            "validate_every": 2,
            "validation_batches": 2,
        },
        "sample": {"bytes": 0},
        "checkpoint": {"every": 0},
        "record": {"enabled": False},
    }
    return config_with(document, *layers)


def _train(config: Config) -> list[tuple[float, float | None, float | None]]:
    recorder = Recorder()
    train(config, cpu_world(), RunDirectory(Path(config.data.path).parent), [recorder])
    return [(one.loss, one.grad_norm, one.validation_loss) for one in recorder.records]


@pytest.mark.parametrize("on_eight", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": {"compute": "bfloat16"}, "train": {"optimizer": "muon"}},
        {
            "memory": {"step_in_backward": True, "checkpoint_every": 1},
            "train": {"grad_clip": 0.0},
        },
    ],
    ids=["adamw", "muon in bfloat16", "steps in backward"],
)
def test_losses_and_norms_have_the_same_bits(
    tmp_path: Path, options: dict[str, Any], on_eight: bool
) -> None:
    hybrid = {"shard": {"strategy": "hsdp", "replicas": 2, "prefetch": 0}}
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"shard": {"strategy": "zero2"}}),
        (4, hybrid),
        *[(8, {})] * on_eight,
    ]
    check(_config(tmp_path, options).with_ranks(1))
    found = [
        run_on(size, _train, _config(tmp_path, options, way).with_ranks(size))[-1]
        for size, way in ways
    ]
    assert len({loss for loss, *_ in found[0]}) == 4, "it trains"
    assert all(one == found[0] for one in found)


class Stopped(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("leaves", [0, 8])
def test_kernels_are_set_before_anything_computes(
    tmp_path: Path, device: str, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_config: Config) -> None:
        raise Stopped

    threads: list[int] = []
    deterministic: list[bool] = []
    monkeypatch.setattr(trainer, "open_corpus", stop)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", deterministic.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    config = _config(tmp_path, {"train": {"reproducible": leaves}}).with_ranks(1)
    with pytest.raises(Stopped):
        Trainer(config, World(0, 1, torch.device(device)))
    is_on_gpu = leaves > 0 and device != "cpu"
    assert threads == [1] * (leaves > 0)
    assert deterministic == [True] * is_on_gpu
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_on_gpu else None)


def _part(config: Config, load: Path | None, last: int, save: Path | None) -> list[float]:
    """Train until step ``last``; return the losses."""
    trainer = Trainer(config, cpu_world())
    if load is not None:
        trainer.load(load)
    records = itertools.islice(steps(trainer), last - trainer.step)
    losses = [record.loss for record in records]
    if save is not None:
        trainer.save(save).wait()
    return losses


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    config = _config(tmp_path, {"train": {"steps": 6}})
    expected = run_on(1, _part, config.with_ranks(1), None, 6, None)[0]
    found: list[float] = []
    load = None
    for last, size in ((2, 2), (4, 4), (6, 1)):
        save = tmp_path / f"step-{last}"
        found += run_on(size, _part, config.with_ranks(size), load, last, save)[0]
        load = save
    assert found == expected


def test_replicas_that_come_and_go_are_refused(tmp_path: Path) -> None:
    config = _config(tmp_path, {"replicas": {"lighthouse": "http://host:1", "count": 2}})
    with pytest.raises(ConfigError, match=r"set train\.reproducible=0"):
        check(config)


@pytest.mark.parametrize(
    ("train", "num_ranks", "way_out"),
    [
        ({"reproducible": 6}, 1, "reproducible=6: expected a power of two"),
        ({"reproducible": 16}, 1, "divides global_batch=8, such as 8"),
        ({"micro_batch": 4}, 1, "leave out micro_batch"),
        ({"global_batch": 24}, 3, "reproducible=8 is not divisible by 3 ranks"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    tmp_path: Path, train: dict[str, Any], num_ranks: int, way_out: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=way_out):
        _config(tmp_path, {"train": train}).with_ranks(num_ranks)
