"""Compares predicted traffic with the bytes that a step sends."""

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.bench.traffic import watch_traffic
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.runtime.module import runtime_of_root
from tests.checkpoint.training import options_for
from tests.models import CASES, build
from tests.ranks import on_ranks
from tests.runtime.one_process import BATCH, own_part

QUANTIZED = sw.Wire(gather="int8", reduce="int4", block=64)
TWO_HOPS = sw.Wire(gather="fp8", reduce="int8", ranks_per_host=2)
HALF = sw.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("gpt", "fsdp", {}),
        ("stack", "fsdp", {"reshard_after_forward": 2}),
        ("stack", "ddp", {"mp_policy": HALF}),
        ("stack", "hsdp", {}),
        ("stack", "fsdp", {"wire": QUANTIZED}),
        ("stack", "hsdp", {"wire": QUANTIZED, "granularity": "dim"}),
        pytest.param(
            "stack",
            "fsdp",
            {"reshard_after_forward": 2, "wire": TWO_HOPS},
            marks=pytest.mark.thorough,
        ),
        pytest.param("stack", "ddp", {"wire": QUANTIZED}, marks=pytest.mark.thorough),
        pytest.param("stack", "hfsdp", {"wire": QUANTIZED}, marks=pytest.mark.thorough),
        pytest.param("stack", "fsdp", {"wire": TWO_HOPS}, marks=pytest.mark.thorough),
        pytest.param("stack", "fsdp", {"mp_policy": HALF}, marks=pytest.mark.thorough),
        pytest.param("stack", "hfsdp", {}, marks=pytest.mark.thorough),
        pytest.param("checkpointed", "fsdp", {}, marks=pytest.mark.thorough),
        pytest.param("conv", "zero2", {}, marks=pytest.mark.thorough),
        pytest.param("stack", "zero1", {}, marks=pytest.mark.thorough),
        pytest.param("stack", "fsdp", {"granularity": "dim"}, marks=pytest.mark.thorough),
    ],
)
def test_a_step_sends_predicted_bytes(name: str, strategy: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    model = sw.fully_shard(build(name), units=case.units, **options_for(strategy), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with watch_traffic(model) as traffic:
            loss = case.loss(model(own_part(case.batch(BATCH))))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    planned = sent_bytes(runtime_of_root(model).plan)
    assert sw.ledger(model).sent_bytes() == planned, "on each axis"
    assert traffic.sent_bytes == planned.total
    is_sent = planned.shard > 0, planned.replicate > 0
    assert (planned.subgroup > 0) == ("reshard_after_forward" in options)
    assert is_sent == (strategy != "ddp", strategy in ("ddp", "hsdp", "hfsdp"))


@on_ranks(4)
def test_bytes_within_subgroups_are_told_from_those_between_them() -> None:
    """A gather and a reduction send to 1 rank in the subgroup and to 2 outside of it."""
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        sw.fully_shard(layer, reshard_after_forward=2)
    sw.fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 32)).sum().backward()
    sent = sw.ledger(model).sent_bytes()
    shard = 32 * 32 * 4 // 4
    flags = 2 * 3  # that a weight was used, to each rank
    within, between = sent.subgroup, sent.shard - sent.subgroup - flags
    again = 2 * shard  # the first layer for backward, of which a rank of the subgroup has half
    assert within == 2 * (shard + shard) + again
    assert between == 2 * (2 * shard + 2 * shard)
    assert sent.total == sent.shard == within + between + flags
    assert sent == sent_bytes(runtime_of_root(model).plan)


@on_ranks(2, thorough=(4,))
def test_large_all_reduces_are_predicted() -> None:
    model = sw.fully_shard(torch.nn.Linear(101, 191), strategy="ddp")
    with watch_traffic(model) as traffic:
        model(torch.ones(2, 101)).sum().backward()
    assert traffic.sent_bytes == sent_bytes(runtime_of_root(model).plan).total
