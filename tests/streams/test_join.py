"""Ranks with unequal numbers of batches on the simulated device: no races, the right numbers."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from tests.models import CASES
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_models, rank, world_size
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import DEVICE, Program
from tests.streams.simulation import Problem, Simulation

PROGRAMS = {
    "fsdp": Program("stack"),
    "checkpointed": Program("checkpointed", prefetch=2),
    "hsdp": Program("stack", strategy="hsdp", prefetch=0),
    "offloaded": Program("stack", offload="copies"),
}


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, marks=() if size == chosen.get(name) else pytest.mark.thorough)
        for chosen in [{"checkpointed": 3, "hsdp": 4}]
        for name in PROGRAMS
        for size in ((4,) if name == "hsdp" else (3, 4))
    ],
)
def test_late_streams_train_unequal_batches(name: str) -> None:
    program = PROGRAMS[name]
    case, reference, model = CASES[program.name], build(program.name), build(program.name)
    torch.manual_seed(1)
    batches = [[case.batch(2) for _ in range(number)] for number in range(world_size())]
    optimizer = program.make_optimizer(reference)
    for number in range(world_size() - 1):
        own = [mine[number] for mine in batches if number < len(mine)]
        torch.autograd.backward(torch.stack([case.loss(reference(x.clone())) for x in own]).mean())
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    simulation = Simulation(is_late=True)
    with simulated(simulation):
        simulation.current_device = DEVICE.index
        program.shard(model.to(DEVICE))
        optimizer = program.make_optimizer(model)
        simulation.current_device = 0
        with sw.join(model, optimizer):
            for batch in batches[rank()]:
                torch.autograd.backward(case.loss(model(batch.to(DEVICE))))
                sw.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        with _disable_current_modes():
            assert_equal_models(model, reference, 0)
        del model, optimizer
    found = [str(one) for one in simulation.found if one.problem is not Problem.SYNC]
    assert not found, "\n".join(found[:5])
