"""Compares the work of matrix owners with arithmetic, and with optimizers on ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.time.owned import PlannedOwners
from shardwise.forecast.time.step import StepTime, step_time
from shardwise.forecast.work import Segment, Workload
from shardwise.plan.plan import Plan, make_plan
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind
from tests.checkpoint.training import options_for
from tests.forecast.owned_jobs import owned_jobs
from tests.models import Gpt, GptBlock
from tests.ranks import on_ranks

RANKS, WIDTH = 8, 8192
LOCAL = Configuration(shard_size=RANKS, sequence=8192)
_A100 = Machine.of(parse_cluster("8xA100"))
MACHINE = replace(_A100, constants=replace(_A100.constants, link=0.01))  # with slow links


def plan_of_squares(count: int, granularity: Any = "element") -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    return make_plan(model, world_size=RANKS, units=nn.Linear, granularity=granularity)


def step_of(plan: Plan, configuration: Configuration) -> StepTime:
    """Predict a step of a model that computes nothing."""
    names = tuple(unit.name for unit in plan.units)
    order = range(len(names))
    forward = [Segment(EventKind.FORWARD, unit, (), 0, 0, 0) for unit in order]
    backward = [Segment(EventKind.BACKWARD, unit, (), 0, 0, 0) for unit in (0, *order[:0:-1])]
    workload = Workload(names, (*forward, *backward), len(forward), 8192)
    return step_time(plan, workload, MACHINE, configuration)


@pytest.mark.parametrize(("count", "most"), [(8, 1), (9, 2)])
def test_the_slowest_owner_and_the_exchange_are_in_the_step(count: int, most: int) -> None:
    """Muon has five Newton-Schulz steps of three products; parts go to the owner and back."""
    constants, device = MACHINE.constants, MACHINE.device
    plan = plan_of_squares(count)
    step = step_of(plan, replace(LOCAL, optimizer="muon"))
    flops = most * 5 * 3 * 2 * WIDTH**3
    work = flops / (device.peak_flops * constants.matmul)
    # An owner receives 7/8 of each matrix and returns as much; a batch has one matrix.
    transfer = 2 * WIDTH * WIDTH * (RANKS - 1) // RANKS
    owners = PlannedOwners(plan, "muon", 2)
    assert owners.exchanged_bytes(owners.loads(MACHINE)) == (most * transfer,) * 2
    exchange = 2 * transfer / (device.link_bandwidth * constants.link)
    assert step.breakdown["owners"] == pytest.approx(work + exchange, rel=0.05)
    assert exchange > 0.2 * work
    assert "owners" not in step_of(plan, LOCAL).breakdown
    assert sum(step.breakdown.values()) == pytest.approx(step.seconds)


def test_whole_matrices_need_no_exchange() -> None:
    owners = PlannedOwners(plan_of_squares(8, "tensor"), "muon", 2)
    assert owners.exchanged_bytes(owners.loads(MACHINE))[0] == 0
    owned = owned_jobs(owners)
    (job, *_), (owner, *_) = owned.jobs, owned.owners
    assert job.parts[owner] == WIDTH * WIDTH


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "hfsdp", "ddp"])
def test_owners_and_bytes_are_those_of_the_optimizer(strategy: str) -> None:
    model = sw.fully_shard(Gpt(vocabulary=50, width=32), units=GptBlock, **options_for(strategy))
    plan = runtime_of_root(model).plan
    for name, kind in (("muon", sw.optim.Muon), ("soap", sw.optim.SOAP)):
        optimizer = kind(sw.optim.parameter_groups(model))
        planned = PlannedOwners(plan, name, 4)
        owned = owned_jobs(planned)
        assert tuple(optimizer.owners().values()) == owned.owners
        batches = owned.batches(range(len(owned.jobs)))
        assert owned.sent_bytes(batches, dist.get_rank()) == optimizer.sent_bytes()
