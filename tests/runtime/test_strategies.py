"""One word changes what is sharded, and no number."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.plan.events import EventKind
from shardwise.plan.plan import make_plan
from shardwise.plan.schedule import schedule
from tests.models import CASES, WIDTH, Block, build
from tests.ranks import run_on
from tests.runtime.one_process import assert_close, assert_equal_training, own_part
from tests.runtime.test_failures import Touchy
from tests.runtime.test_memory import runtime_of


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 2), ("ddp", 3), ("ddp", 4), ("zero2", 3), ("hsdp", 4), ("_HYBRID_SHARD_ZERO2", 4)],
)
def test_every_model_trains_as_in_one_process(strategy: str, ranks: int) -> None:
    run_on(ranks, _train_all, strategy, deadline=120.0)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_replicas_stay_bitwise_equal(strategy: str) -> None:
    trained = run_on(4, _train_float32, strategy)
    if strategy == "ddp":
        assert len(set(trained)) == 1
    else:
        assert trained[0] == trained[2]
        assert trained[1] == trained[3]


def test_ddp_gathers_nothing_and_keeps_all() -> None:
    run_on(2, _ddp_events)


def test_zero2_gathers_once_a_step() -> None:
    run_on(2, _zero2_events)


def test_a_mesh_that_does_not_fit_the_strategy() -> None:
    run_on(4, _wrong_mesh)


@pytest.mark.parametrize("raising", [0, 3])
@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_an_exception_reaches_every_replica(strategy: str, raising: int) -> None:
    run_on(4, _raise_on_one, strategy, raising, deadline=40.0)


def test_diverging_replicas_are_named() -> None:
    run_on(4, _diverge, deadline=40.0)


def _options(strategy: str) -> dict[str, Any]:
    if "hsdp" not in strategy and "HYBRID" not in strategy:
        return {"strategy": strategy}
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return {"strategy": strategy, "mesh": mesh}


def _train_all(strategy: str) -> None:
    options = _options(strategy)
    for name in CASES:
        assert_equal_training(name, **options)
    assert_equal_training("gpt", accumulate=2, clip=0.01, **options)
    assert_equal_training("lora", set_to_none=False, prefetch=0, **options)


def _train_float32(strategy: str) -> bytes:
    model = nn.Sequential(*(Block() for _ in range(3)))
    sw.fully_shard(model, units=Block, **_options(strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(50):
        model(own_part(torch.randn(12, WIDTH))).square().mean().backward()
        sw.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    locals_ = [p.to_local().detach() for p in model.parameters() if isinstance(p, sw.ShardedTensor)]
    return torch.cat(locals_).numpy().tobytes()


def _ddp_events() -> None:
    model = build("stack")
    plan = make_plan(model, world_size=1, units=Block, strategy="ddp")
    sw.fully_shard(model, units=Block, strategy="ddp")
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    assert events == schedule(plan)
    assert {event.kind for event in events} == {
        EventKind.FORWARD, EventKind.BACKWARD, EventKind.REDUCE, EventKind.COLLECT,
    }  # fmt: skip
    assert sw.ledger(model).peak_gathered_bytes() == 0
    for parameter in model.parameters():
        assert isinstance(parameter, sw.ShardedTensor)
        assert parameter.to_local().numel() == parameter.numel()


def _zero2_events() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, strategy="zero2")
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    gathers = [event.unit for event in events if event.kind is EventKind.GATHER]
    assert sorted(gathers) == sorted(unit.label for unit in runtime_of(model).plan.units)


def _wrong_mesh() -> None:
    with pytest.raises(sw.PlanError, match="needs a mesh with two dimensions"):
        sw.fully_shard(Block(), strategy="hsdp")
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(sw.PlanError, match=r"1 dimensions.*'hsdp'"):
        sw.fully_shard(Block(), strategy="hsdp", mesh=mesh)


def _raise_on_one(strategy: str, raising: int) -> None:
    reference = nn.Sequential(Block(), Touchy(), Block()).double()
    model = nn.Sequential(Block(), Touchy(), Block()).double()
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units={Block, Touchy}, **_options(strategy))
    touchy = model[1]
    assert isinstance(touchy, Touchy)
    own = dist.get_rank() == raising
    for where in ("forward", "backward"):
        touchy.where = where if own else ""
        with pytest.raises(ValueError if own else sw.PeerAborted):
            model(torch.randn(4, WIDTH).double()).square().mean().backward()
        touchy.where = ""
        batch = torch.randn(12, WIDTH).double()
        model.zero_grad()
        reference.zero_grad()
        model(own_part(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name)


def _diverge() -> None:
    model = nn.Sequential(*(Block() for _ in range(3))).double()
    sw.fully_shard(model, units=Block, **_options("hsdp"))
    x = torch.randn(4, WIDTH).double()
    model(x).sum().backward()
    with pytest.raises(sw.RanksDiverged, match=r"rank 3: step 1.*waits for"):  # noqa: PT012
        if dist.get_rank() == 3:
            model[0](x)
        model(x).sum().backward()
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
