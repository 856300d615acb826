"""Traces of torch's profiler show units as ranges that contain their operators."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.integrations.profiler import unit_ranges
from tests.ranks import on_ranks


@on_ranks(2)
def test_units_are_ranges_that_contain_their_operators() -> None:
    model = sw.fully_shard(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), units=nn.Linear
    )
    with unit_ranges(model), profile(activities=[ProfilerActivity.CPU]) as trace:
        model(torch.randn(3, 4)).sum().backward()
    events = trace.events() or []
    names = {event.name for event in events}
    for kind in ("gather", "wait", "forward", "backward", "free", "reduce"):
        assert {f"{kind} 0", f"{kind} 2"} <= names, kind
    parents = [event.cpu_parent.name for event in events if event.name == "aten::linear"]
    assert parents == ["forward 0", "forward 2"]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(torch.randn(3, 4)).sum().backward()
    assert not {event.name for event in trace.events() or []} & {
        "forward 0",
        "backward 0",
        "gather 0",
    }
