"""The strategy changes what is sharded, but no numbers."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.forecast.time.replay import schedule
from shardwise.plan.plan import make_plan
from shardwise.plan.strategy import PRESETS
from shardwise.schedule.events import EventKind
from tests.covering import covered_first
from tests.models import CASES, WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_equal_models,
    assert_equal_training,
    comm_of,
    options_of,
    own_part,
    runtime_of,
    sharded_pair,
    step_all,
)

# World sizes at which a strategy is compared with one process; "fsdp" is, in test_equality.py.
# How much the outer and the inner axis shard: 0 is nothing, 3 is everything.


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size", "method"),
    covered_first(
        (name, 2 * row.num_axes, method)
        for (name, row), method in product(
            PRESETS.items(), ("set_requires_gradient_sync", "set_requires_all_reduce")
        )
    ),
)
def test_gradients_may_wait_for_the_last_micro_batch(strategy: str, method: str) -> None:
    reference, model = sharded_pair("gpt", units="auto", **options_of(strategy))
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    for step in range(2):
        for micro in range(3):
            batch = CASES["gpt"].batch(12)
            getattr(model, method)(micro == 2)
            (model(own_part(batch)) / 3).backward()
            (reference(batch) / 3).backward()
        assert_equal_models(model, reference, step)
        step_all(optimizers)
    assert_equal_models(model, reference, 2)


@on_ranks(4)
def test_hfsdp_crosses_the_outer_axis_once_a_step() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, **options_of("hfsdp"))
    plan = runtime_of(model).plan
    x = torch.randn(4, WIDTH).double()
    for _ in range(2):
        model(x).sum().backward()
    assert sw.ledger(model).events() == schedule(plan)
    outer = [unit.label for unit in plan.units if unit.gathered_bytes]
    kinds = Counter(event.kind for event in schedule(plan))
    assert kinds[EventKind.RESHARD_TO_SUBGROUP] == kinds[EventKind.FREE_SUBGROUP] == len(outer)
    assert kinds[EventKind.GATHER] > len(outer)
    for is_last in (False, False, True):  # one optimizer step
        model.set_requires_all_reduce(is_last)
        model(x).sum().backward()
        kinds = Counter(event.kind for event in sw.ledger(model).events())
        sent = sw.ledger(model).step - 3
        assert kinds[EventKind.RESHARD_TO_SUBGROUP] == (len(outer) if sent == 0 else 0)
        assert kinds[EventKind.FREE_SUBGROUP] == (len(outer) if is_last else 0)
    assert sw.ledger(model).gathered_bytes == 0


@on_ranks(4)
def test_a_smaller_group_needs_only_a_part() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, reshard_after_forward=2)
    plan = runtime_of(model).plan
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    assert events == schedule(plan)
    kept = [event for event in events if event.kind is EventKind.RESHARD_TO_SUBGROUP]
    assert kept
    assert all(2 * event.bytes == plan.units[event.unit].gathered_bytes for event in kept)
    assert sw.ledger(model).gathered_bytes == 0
    with pytest.raises(sw.PlanError, match=r"reshard_after_forward=3: .*: 1, 2, 4"):
        sw.fully_shard(build("stack"), reshard_after_forward=3)
    with pytest.raises(sw.PlanError, match=r"'zero2' does not shard parameters"):
        sw.fully_shard(build("stack"), reshard_after_forward=2, strategy="zero2")


@on_ranks(2)
def test_ddp_reduces_during_backward_without_being_told_units() -> None:
    model = nn.Sequential(
        *(nn.Linear(1024, 7000) if i % 2 else nn.Linear(7000, 1024) for i in range(3))
    )
    sw.fully_shard(model, strategy="ddp")
    for _ in range(2):
        model(torch.randn(1, 7000)).sum().backward()
    kinds = [event.kind for event in sw.ledger(model).events()]
    last_compute = len(kinds) - kinds[::-1].index(EventKind.BACKWARD)
    assert kinds[:last_compute].count(EventKind.REDUCE) >= 2
    assert EventKind.GATHER not in kinds


@on_ranks(2)
def test_ddp_gathers_nothing_and_keeps_all() -> None:
    model = build("stack")
    plan = make_plan(model, world_size=1, units=Block, strategy="ddp")
    sw.fully_shard(model, units=Block, strategy="ddp")
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    assert events == schedule(plan)
    assert {event.kind for event in events} == {
        EventKind.FORWARD, EventKind.BACKWARD, EventKind.REDUCE, EventKind.FINISH_REDUCE,
    }  # fmt: skip
    assert sw.ledger(model).peak_gathered_bytes() == 0
    for parameter in model.parameters():
        assert isinstance(parameter, sw.ShardedTensor)
        assert parameter.to_local().numel() == parameter.numel()


@on_ranks(2)
def test_zero2_gathers_once_a_step() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, strategy="zero2")
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    gathers = [event.unit for event in events if event.kind is EventKind.GATHER]
    assert sorted(gathers) == list(range(len(runtime_of(model).plan.units)))


@on_ranks(4)
def test_a_mesh_that_does_not_fit_the_strategy() -> None:
    with pytest.raises(sw.PlanError, match="needs a mesh with two dimensions"):
        sw.fully_shard(Block(), strategy="hsdp")
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(sw.PlanError, match=r"expects a 2D DeviceMesh .*'hsdp'"):
        sw.fully_shard(Block(), strategy="hsdp", mesh=mesh)
    with pytest.raises(sw.PlanError, match="either mesh or sharding_factor"):
        sw.fully_shard(Block(), mesh=mesh, sharding_factor=4)
    with pytest.raises(sw.PlanError, match=r"sharding_factor=3: .*: 1, 2, 4"):
        sw.fully_shard(Block(), strategy="hsdp", sharding_factor=3)
    with pytest.raises(sw.PlanError, match=r"sharding_factor=2: .*'fsdp' shards over all 4"):
        sw.fully_shard(Block(), sharding_factor=2)


@on_ranks(4)
@pytest.mark.parametrize(
    "strategy", ["fsdp", "hsdp", pytest.param("hfsdp", marks=pytest.mark.thorough)]
)
def test_gathers_and_reductions_in_one_queue(strategy: str) -> None:
    options = {**options_of(strategy), "communicators": "shared"}
    model = assert_equal_training("stack", accumulate=2, clip=0.5, prefetch=2, **options)
    comm = comm_of(model)
    assert comm.gather is comm.reduce
    other = assert_equal_training("stack", **options_of(strategy))
    assert comm_of(other) is not comm
