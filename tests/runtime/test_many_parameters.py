"""Sharding, training, saving and initializing thousands of parameters take linear time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.counting import lines_by_function, num_calls
from tests.ranks import on_ranks

LARGE, SMALL = 80, 10  # layers
CALLS_PER_PARAMETER = 1500  # measured: 500 on one rank

FEW, TIMES = 8, 4  # wide layers of the smaller model, and how many times as many of the larger one
WIDTH = 256  # wide enough for gradients in slots
OPTIONS: dict[str, dict[str, Any]] = {
    "layers of a unit": {},
    "units": {"units": nn.Linear},
    "ddp": {"units": nn.Linear, "strategy": "ddp"},
}


@on_ranks(2, thorough=(1,))
def test_sharding_takes_linear_time() -> None:
    """Calls are counted because time depends on the machine."""
    for units in (None, nn.Linear):
        small, large = (
            num_calls(partial(sw.fully_shard, _model(size), units=units)) for size in (SMALL, LARGE)
        )
        assert large < CALLS_PER_PARAMETER * 4 * LARGE, f"{units}: {large:,}"
        assert large < 1.2 * small * LARGE / SMALL, f"{units}: {small:,}, {large:,}"


@pytest.mark.parametrize("name", OPTIONS)
def test_no_function_takes_more_than_linear_time(name: str, tmp_path: Path) -> None:
    """Lines are counted by function: one that is quadratic is small in a sum with few layers."""
    small, large = (_actions(n, OPTIONS[name], tmp_path) for n in (FEW, FEW * TIMES))
    for few, many in zip(small, large, strict=True):
        before, after = lines_by_function(few), lines_by_function(many)
        faster = {one: (before[one], after[one]) for one in after if after[one] > 6 * before[one]}
        grown = {one: pair for one, pair in faster.items() if pair[1] > after.total() / 200}
        assert not grown, f"{many}: lines run with {FEW} and {FEW * TIMES} layers: {grown}"


def _actions(layers: int, options: dict[str, Any], path: Path) -> list[Callable[[], object]]:
    model: Any = _wide_model(layers)
    sw.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(1, WIDTH)

    def step() -> None:
        for _ in range(2):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def save_and_load() -> None:
        sw.save(path / str(layers), model=model, optimizer=optimizer)
        sw.load(path / str(layers), model=model, optimizer=optimizer)

    def initialize() -> None:
        with torch.device("meta"):
            copied = _wide_model(layers)
        sw.fully_shard(copied, init=sw.Initialization(1), **options)

    for _ in range(2):
        step()
    return [step, model.state_dict, save_and_load, initialize]


def _wide_model(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def _model(num_layers: int) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(num_layers))
    return nn.Sequential(*layers)
