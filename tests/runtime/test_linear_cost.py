"""What the engine does in Python grows with the number of layers and units, and not faster."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

PACKAGE = str(Path(sw.__file__).parent)
FEW, TIMES = 8, 4  # layers of the smaller model, and how many times as many the larger one has
WIDTH = 256  # wide enough for gradients in slots
OPTIONS: dict[str, dict[str, Any]] = {
    "layers of a unit": {},
    "units": {"units": nn.Linear},
    "ddp": {"units": nn.Linear, "strategy": "ddp"},
}


def lines_of(action: Callable[[], object]) -> Counter[str]:
    """Count the lines of the package that ``action`` runs, by function."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: object) -> Any:
        found[f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"] += event == "line"
        return count

    def choose(frame: FrameType, _event: str, _argument: object) -> Any:
        return count if frame.f_code.co_filename.startswith(PACKAGE) else None

    threading.settrace(choose)
    sys.settrace(choose)
    try:
        action()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return found


def actions_of(layers: int, options: dict[str, Any], path: Path) -> list[Callable[[], object]]:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
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
            copied: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        sw.fully_shard(copied, init=sw.Initialization(1), **options)

    for _ in range(2):
        step()
    return [step, model.state_dict, save_and_load, initialize]


@pytest.mark.parametrize("name", OPTIONS)
def test_python_work_grows_with_the_model(name: str, tmp_path: Path) -> None:
    small, large = (actions_of(n, OPTIONS[name], tmp_path) for n in (FEW, FEW * TIMES))
    for few, many in zip(small, large, strict=True):
        before, after = lines_of(few), lines_of(many)
        faster = {one: (before[one], after[one]) for one in after if after[one] > 6 * before[one]}
        grown = {one: pair for one, pair in faster.items() if pair[1] > after.total() / 200}
        assert not grown, f"{many}: lines run with {FEW} and {FEW * TIMES} layers: {grown}"
