"""The strategy changes what is sharded, but no numbers."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.plan.plan import make_plan
from shardwise.plan.strategy import PRESETS, Strategy
from shardwise.schedule.events import EventKind
from shardwise.schedule.sequencer import schedule
from tests.covering import covered_first
from tests.models import CASES, LIKE_OTHERS, WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.modules import FailingLinear
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_training,
    comm_of,
    options_of,
    own_part,
    runtime_of,
    step_all,
)

# World sizes at which a strategy is compared with one process; "fsdp" is, in test_equality.py.
SIZES = {
    "ddp": (2, 3, 4),
    "zero2": (3,),
    "hsdp": (4,),
    "hfsdp": (4,),
    "zero1": (2, 3),
    "_HYBRID_SHARD_ZERO2": (4,),
}
SOME = ("stack", "gpt", "unused and reused", "tied", "lora", "checkpointed")
# How much the outer and the inner axis shard: 0 is nothing, 3 is everything.
LEVELS = ((0, 1), (1, 2), (2, 3), (1, 1), (2, 2), (3, 3))


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size", "name"),
    covered_first(
        (
            (strategy, size, name)
            for strategy, sizes in SIZES.items()
            for size, name in product(sizes, CASES)
        ),
        leave=LIKE_OTHERS,
    ),
)
def test_every_model_trains_as_in_one_process(strategy: str, name: str) -> None:
    assert_equal_training(name, **options_of(strategy))


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    covered_first((strategy, size) for strategy, sizes in SIZES.items() for size in sizes),
)
def test_other_loops_train_as_in_one_process(strategy: str) -> None:
    options = options_of(strategy)
    assert_equal_training("gpt", accumulate=2, clip=0.01, **options)
    assert_equal_training("lora", set_to_none=False, prefetch=0, **options)


@on_ranks(4)
@pytest.mark.parametrize(("levels", "name"), covered_first(product(LEVELS, SOME)), ids=str)
def test_rows_of_ones_own_train_as_in_one_process(levels: tuple[int, int], name: str) -> None:
    _train_some(name, {"strategy": row_of(levels), "sharding_factor": 2})


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "factor", "name"), covered_first(product(("hsdp", "hfsdp"), (1, 4), SOME))
)
def test_any_sharding_factor(strategy: str, factor: int, name: str) -> None:
    _train_some(name, {"strategy": strategy, "sharding_factor": factor})


@on_ranks(4)
@pytest.mark.parametrize(
    ("size", "prefetch", "name"), covered_first(product((1, 2, 4), (2, 0), SOME))
)
def test_parameters_are_gathered_again_from_a_smaller_group(
    size: int, prefetch: int, name: str
) -> None:
    _train_some(name, {"reshard_after_forward": size, "prefetch": prefetch})


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
    reference, model = build("gpt"), build("gpt")
    sw.fully_shard(model, units="auto", **options_of(strategy))
    assert isinstance(model, sw.FSDPModule)
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    for _ in range(2):
        for micro in range(3):
            batch = CASES["gpt"].batch(12)
            getattr(model, method)(micro == 2)
            (model(own_part(batch)) / 3).backward()
            (reference(batch) / 3).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name)
        step_all(optimizers)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p, q, name)


@on_ranks(4)
def test_hfsdp_crosses_the_outer_axis_once_a_step() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, **options_of("hfsdp"))
    plan = runtime_of(model).plan
    assert isinstance(model, sw.FSDPModule)
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
    ("strategy", "raising"), covered_first(product(("ddp", "hsdp"), (0, 3)), strength=1)
)
def test_an_exception_reaches_every_replica(strategy: str, raising: int) -> None:
    reference = nn.Sequential(Block(), FailingLinear(), Block()).double()
    model = nn.Sequential(Block(), FailingLinear(), Block()).double()
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units={Block, FailingLinear}, **options_of(strategy))
    failing = model[1]
    assert isinstance(failing, FailingLinear)
    own = dist.get_rank() == raising
    for where in ("forward", "backward"):
        failing.where = where if own else ""
        with pytest.raises(ValueError if own else sw.PeerAborted):
            model(torch.randn(4, WIDTH).double()).square().mean().backward()
        failing.where = ""
        batch = torch.randn(12, WIDTH).double()
        model.zero_grad()
        reference.zero_grad()
        model(own_part(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name)


@on_ranks(4)
def test_diverging_replicas_are_named() -> None:
    model = nn.Sequential(*(Block() for _ in range(3))).double()
    sw.fully_shard(model, units=Block, **options_of("hsdp"))
    x = torch.randn(4, WIDTH).double()
    model(x).sum().backward()
    with pytest.raises(sw.RanksDiverged, match=r"\n  3 +1 +forward of 0 "):  # noqa: PT012
        if dist.get_rank() == 3:
            model[0](x)
        model(x).sum().backward()
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()


def row_of(levels: tuple[int, int]) -> Strategy:
    parameters, gradients, optimizer = (
        tuple("shard" if level >= needed else "replicate" for level in levels)
        for needed in (3, 2, 1)
    )
    return Strategy(parameters, gradients, optimizer)


def _train_some(name: str, options: dict[str, Any]) -> None:
    assert_equal_training(name, **options)
    if name == "stack":
        assert_equal_training(name, accumulate=2, clip=0.01, **options)


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
