"""Buffers of collectives in memory that the backend registers, and in symmetric memory."""

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise._private import can_swap_storages
from shardwise.comm import process_group
from shardwise.comm.api import MemoryKind, RankGroup
from shardwise.comm.communicator import Communicator
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.errors import PlanError, StepError
from tests.models import Block, Stack
from tests.ranks import on_ranks
from tests.streams.checker import check_ranks
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import DEVICE, Program, assert_trains_as_in_one_process, train
from tests.streams.simulation import Problem, Simulation

REGISTERED, SYMMETRIC = MemoryKind.REGISTERED, MemoryKind.SYMMETRIC
pytestmark = pytest.mark.skipif(
    not can_swap_storages(), reason="torch before 2.13 has no registered memory"
)
LARGE = 200  # bytes; flags, norms and checks are smaller


def program(kind: MemoryKind, **options: Any) -> Program:
    return Program(memory=kind, steps=3, **options)


ROWS = {
    "registered": program(REGISTERED),
    "symmetric hsdp": program(SYMMETRIC, strategy="hsdp", accumulate=2),
    "registered in rows": program(REGISTERED, strategy="hsdp", accumulate=3, in_rows=True),
}
THOROUGH = {
    f"{kind} {strategy} {accumulate}": program(kind, strategy=strategy, accumulate=accumulate)
    for kind, strategy, accumulate in product(
        (REGISTERED, SYMMETRIC), ("ddp", "zero2", "fsdp", "hsdp", "hfsdp"), (1, 2)
    )
}
for _kind in (REGISTERED, SYMMETRIC):
    THOROUGH[f"{_kind} dim"] = program(_kind, granularity="dim")
    THOROUGH[f"{_kind} offload"] = program(_kind, offload="all")
    THOROUGH[f"{_kind} several"] = program(_kind, name="stack", prefetch=2)
    THOROUGH[f"{_kind} shared"] = program(_kind, options={"communicators": "shared"})
ALL = ROWS | THOROUGH
NAMES = [*ROWS, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)]


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2 if name == "registered" else 4) for name in ROWS),
        *(pytest.param(name, 4, marks=pytest.mark.thorough) for name in THOROUGH),
    ],
)
def test_training_in_registered_memory_is_that_of_one_process(name: str) -> None:
    assert_trains_as_in_one_process(ALL[name])


@pytest.mark.parametrize("name", NAMES)
def test_streams_and_places_in_registered_memory(name: str) -> None:
    for verdict in check_ranks(ALL[name], num_ranks=4):
        may_wait = ALL[name].offload is not None
        assert not {one for one in verdict.found if not may_wait or one.problem != Problem.SYNC}
        is_symmetric = ALL[name].memory is SYMMETRIC
        large = [one for one in verdict.collectives if one.num_bytes > LARGE and one.is_planned]
        assert large
        places = {one.place for one in large}
        assert all(bool(place) is is_symmetric for place in places)


@on_ranks(2)
def test_memory_is_registered_once_and_gathers_need_no_kernels() -> None:
    simulation = Simulation()
    with simulated(simulation):
        train(Program(memory=SYMMETRIC, steps=4), simulation, build("small"))
    assert simulation.num_registered <= 3  # large gathers, small gathers, gradients
    assert ["/gather/" in name for name in simulation.groups_without_kernels] == [True]
    assert len(simulation.groups) == 2


@on_ranks(2)
def test_ranks_that_allocate_other_symmetric_memory_raise() -> None:
    with simulated(Simulation()):
        world = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
        queue = Communicator(world, DEVICE).gather
        assert isinstance(queue, ProcessGroupCollectives)
        queue.use_memory(SYMMETRIC, only_moves=True)
        queue.allocate(64, world, "offsets {'a': 0}")
        own = "b" if world.own_rank == 0 else "c"
        # The rank that comes first is right.
        found = r"(offsets {'b': 0}.* rank 1 .*offsets {'c': 0}|offsets {'c': 0}.* rank 0 .*'b')"
        with pytest.raises(StepError, match=found):
            queue.allocate(64, world, f"offsets {{'{own}': 0}}")


@on_ranks(3)
def test_a_rank_that_cannot_allocate_symmetric_memory_keeps_no_other_waiting() -> None:
    """In C++, where all ranks wait for each other."""
    rendezvous = []

    def allocate(_bytes: int, _group: Any, device: torch.device, together: Any) -> torch.Tensor:
        with together:
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("no more")
        rendezvous.append(device)
        return torch.empty(0)

    with simulated(Simulation()), mock.patch.object(process_group, "symmetric_tensor", allocate):
        world = RankGroup((0, 1, 2), dist.get_rank(), dist.group.WORLD)
        queue = Communicator(world, DEVICE).gather
        assert isinstance(queue, ProcessGroupCollectives)
        queue.use_memory(SYMMETRIC, only_moves=True)
        error = torch.OutOfMemoryError if world.own_rank == 1 else StepError
        match = "no more" if world.own_rank == 1 else r"rank 1 raised OutOfMemoryError\('no more'\)"
        with pytest.raises(error, match=match):
            queue.allocate(64, world, "offsets {}")
    assert not rendezvous


@on_ranks(2)
def test_memory_that_cannot_be_swapped_in_is_refused_at_the_call() -> None:
    model = shard(Stack(depth=1))
    with mock.patch("shardwise.features.collective_memory.can_swap_storages", return_value=False):
        with pytest.raises(PlanError, match=r"memory that gloo allocates .*torch 2\.12"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(PlanError, match=r"memory that gloo allocates .*torch 2\.12"):
            model.set_symm_mem_for_comm()
    model(torch.randn(3, 6)).sum().backward()


@on_ranks(2)
def test_a_backend_without_such_memory_is_named_at_the_call() -> None:
    model = shard(Stack(depth=1))
    with pytest.raises(PlanError, match=r"gloo allocates no tensors on cpu.*leave the call out"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(PlanError, match=r"gloo has no symmetric memory on cpu.*leave the call out"):
        model.set_symm_mem_for_comm()
    with pytest.raises(PlanError, match=r"expected .NCCL"):
        model.set_symm_mem_for_comm("NVSHMEM")
    model.set_allocate_memory_from_process_group_for_comm(False)
    model(torch.randn(3, 6)).sum().backward()


@on_ranks(2)
def test_memory_cannot_be_replaced_within_a_step() -> None:
    with simulated(Simulation()):
        model = shard(Stack(depth=1).to(DEVICE))
        loss = model(torch.randn(3, 6).to(DEVICE)).sum()
        with pytest.raises(StepError, match="before the first forward"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        torch.autograd.backward(loss)


def shard(model: nn.Module) -> Any:
    return sw.fully_shard(model, units=Block)
