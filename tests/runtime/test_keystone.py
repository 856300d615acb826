"""recorded(engine) == schedule(plan): the engine does what the schedule predicts."""

from itertools import product
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.forecast.time.replay import schedule
from shardwise.plan.plan import make_plan
from tests.covering import covered_first
from tests.models import CASES, build
from tests.ranks import on_ranks
from tests.runtime.one_process import own_part, world_size

# Their units run once each, in module order, inside the root.
IN_MODULE_ORDER = [
    "stack", "stack, one unit", "stack, every layer", "stack, by size", "sequential", "gpt", "conv",
    "frozen", "lora", "tied", "tiny", "mixed dtypes", "structured", "recurrent",
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
]


@on_ranks(2, thorough=(1,))
@pytest.mark.parametrize(("name", "options"), covered_first(product(IN_MODULE_ORDER, OPTIONS)))
def test_recorded_is_scheduled(name: str, options: dict[str, Any]) -> None:
    case, model = CASES[name], build(name)
    plan = make_plan(model, world_size=world_size(), units=case.units, **options)
    sw.fully_shard(model, units=case.units, **options)
    for step in range(3):
        loss = case.loss(model(own_part(case.batch(12))))
        loss.backward()  # type: ignore[no-untyped-call]
        if step:  # the first records the order
            assert sw.ledger(model).events() == schedule(plan), f"in step {step}"
    with torch.no_grad():
        model(own_part(case.batch(12)))
