"""Every switch of the trainer leaves the losses what they are, as far as its precision goes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.launch.world import World
from shardwise.train.build import check
from shardwise.train.config import Config
from shardwise.train.loop import train
from shardwise.train.records import Record, Silent
from shardwise.train.run_directory import RunDirectory
from tests.ranks import run_on

PLAIN: dict[str, Any] = {"train": {"grad_clip": 0.0}}
SWITCHES: dict[str, dict[str, Any]] = {
    "step in backward": {"memory": {"step_in_backward": True}},
    "step in backward, whole gradients, on the host": {
        "memory": {"step_in_backward": True, "accumulate": "whole", "offload": "all"},
        "train": {"micro_batch": 1},
    },
    "activations on the host": {"memory": {"activations": "host", "offload": "optimizer"}},
    "selective": {"memory": {"checkpoint_every": 1, "checkpoint": "selective"}},
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    return path


@pytest.mark.parametrize("name", SWITCHES)
def test_losses_are_those_of_the_plain_run(text: Path, name: str) -> None:
    plain, switched = (_run(text, PLAIN, changes) for changes in ({}, SWITCHES[name]))
    losses = [record.loss for record in plain]
    assert losses[-1] < losses[0] - 0.5
    assert [record.loss for record in switched] == pytest.approx(losses, rel=1e-5)
    in_backward = "step in backward" in name
    assert all((record.grad_norm is None) == in_backward for record in switched)


def test_float16_skips_steps_until_its_scale_fits(text: Path) -> None:
    plain, half = (_run(text, {}, {"precision": {"compute": c}}) for c in ("float32", "float16"))
    assert all(record.loss_scale is None for record in plain)
    scales = [record.loss_scale for record in half]
    assert all(scale is not None and 1 <= scale <= 2**16 for scale in scales)
    assert half[-1].loss == pytest.approx(plain[-1].loss, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({}, "set train.grad_clip=0"),
        (PLAIN | {"precision": {"compute": "float16"}}, "set precision.compute=bfloat16"),
        (
            {"train": {"grad_clip": 0.0, "micro_batch": 1, "global_batch": 4}},
            "set memory.accumulate=whole",
        ),
    ],
)
def test_what_a_step_in_backward_cannot_know(
    text: Path, changes: dict[str, Any], way_out: str
) -> None:
    config = _config(text, changes, {"memory": {"step_in_backward": True}})
    with pytest.raises(ConfigError, match=way_out):
        check(config)


def _config(text: Path, *layers: dict[str, Any]) -> Config:
    document: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
        "data": {"path": str(text)},
        "train": {"steps": 8, "warmup_steps": 0, "global_batch": 4, "validation_batches": 1},
        "sample": {"bytes": 0},
        "checkpoint": {"every": 0},
    }
    for layer in layers:
        for section, values in layer.items():
            document[section] = document.get(section, {}) | values
    return Config.model_validate(document)


def _run(text: Path, *layers: dict[str, Any]) -> list[Record]:
    return run_on(2, _train, _config(text, *layers), deadline=60.0)[0]


class _Recorder(Silent):
    def __init__(self) -> None:
        self.records: list[Record] = []

    def step(self, record: Record) -> None:
        self.records.append(record)


def _train(config: Config) -> list[Record]:
    recorder = _Recorder()
    ranks = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    train(config, ranks, recorder, RunDirectory(Path(config.data.path).parent))
    return recorder.records
