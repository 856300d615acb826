"""Each axis has two strict process groups, created once, whatever other ranks do."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from tests.models import Block, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_equal_models
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import DEVICE
from tests.streams.simulation import Problem, Simulation

STEPS = 2


class Twins:
    """A model on the ranks of a mesh, and a copy in one process."""

    def __init__(
        self, mesh: DeviceMesh | None, ranks: Sequence[int], strategy: str, **options: Any
    ) -> None:
        torch.manual_seed(len(ranks))
        self.reference, self.model = Stack(depth=2).double(), Stack(depth=2).double()
        self.model.load_state_dict(self.reference.state_dict())
        options |= {"units": Block, "mesh": mesh, "strategy": strategy}
        sw.fully_shard(self.model.to(DEVICE), **options)
        self.ranks = ranks
        self.is_exact = "wire" not in options
        self.optimizers = [adamw(net.parameters()) for net in (self.reference, self.model)]

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        batch = torch.randn(12, 6, dtype=torch.float64)
        part = batch.chunk(len(self.ranks))[self.ranks.index(dist.get_rank())]
        self._train(self.model, part.to(DEVICE), self.optimizers[1])
        with _disable_current_modes():
            self._train(self.reference, batch, self.optimizers[0])
            if self.is_exact:
                assert_equal_models(self.model, self.reference, number)

    def _train(self, net: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        torch.autograd.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train(simulation: Simulation, *models: Twins) -> None:
    """They take turns; all groups exist after the first step."""
    for number in range(STEPS):
        for model in models:
            model.step(number)
        if not number:
            made = list(simulation.groups)
    assert simulation.groups == made
    assert len(set(made)) == len(made)
    assert not [one for one in simulation.found if one.problem is not Problem.SYNC]


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "num_groups"), [("fsdp", 2), pytest.param("ddp", 1, marks=pytest.mark.thorough)]
)
def test_models_on_parts_of_the_ranks(strategy: str, num_groups: int) -> None:
    """Some ranks have created other groups before, and the ranks of one model are permuted."""
    simulation = Simulation(is_late=True)
    simulation.current_device = DEVICE.index
    rank = dist.get_rank()
    # All ranks call this, which creates groups of torch only.
    meshes = {ranks: DeviceMesh("cpu", ranks) for ranks in ((1, 3), (2, 0))}
    ranks = next(ranks for ranks in meshes if rank in ranks)
    with simulated(simulation):
        mesh = DeviceMesh.from_group(meshes[ranks].get_group(), "cuda")
        train(simulation, Twins(mesh, ranks, strategy))
    assert len(simulation.groups) == num_groups


@on_ranks(2)
def test_two_models_on_one_group() -> None:
    simulation = Simulation(is_late=True)
    simulation.current_device = DEVICE.index
    with simulated(simulation):
        train(simulation, *(Twins(None, range(2), strategy) for strategy in ("fsdp", "zero2")))
    assert len(simulation.groups) == 2, "one for gathers and one for reductions"


def mesh_of(strategy: str) -> DeviceMesh | None:
    if strategy == "fsdp":
        return None
    names = ("replicate", "shard")
    ranks = torch.arange(4).view(2, 2)
    return DeviceMesh("cuda", ranks, mesh_dim_names=names, _init_backend=False)


@on_ranks(4)
@pytest.mark.parametrize("strategy", [pytest.param("hsdp", marks=pytest.mark.thorough), "hfsdp"])
def test_groups_of_two_axes(strategy: str) -> None:
    simulation = Simulation(is_late=True)
    simulation.current_device = DEVICE.index
    with simulated(simulation):
        train(simulation, Twins(mesh_of(strategy), range(4), strategy))
    rank = dist.get_rank()
    row, column = (rank - rank % 2, rank - rank % 2 + 1), (rank % 2, rank % 2 + 2)
    made = Counter(ranks for ranks, _ in simulation.groups)
    assert made.keys() <= {row, column, (0, 1, 2, 3)}
    assert max(made.values()) == 2, "one for gathers and one for reductions"


@on_ranks(4)
@pytest.mark.parametrize(
    "has_wire", [(True, False), pytest.param((False, True), marks=pytest.mark.thorough)]
)
def test_a_model_with_a_wire_and_one_without(has_wire: tuple[bool, bool]) -> None:
    """The sums of the one are relayed on the first stream, those of the other on the second."""
    simulation = Simulation(is_late=True)
    simulation.current_device = DEVICE.index
    wires = [{"wire": sw.Wire(reduce="int8")} if each else {} for each in has_wire]
    with simulated(simulation):
        mesh = mesh_of("hsdp")
        train(simulation, *(Twins(mesh, range(4), "hsdp", **wire) for wire in wires))


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.thorough), ("hfsdp", 4)],
)
def test_gathers_and_reductions_may_share_the_groups_of_an_axis(strategy: str) -> None:
    """Each group is used on one stream only, in the order of the launches."""
    simulation, ranks = Simulation(is_late=True), range(dist.get_world_size())
    simulation.current_device = DEVICE.index
    with simulated(simulation):
        train(
            simulation,
            Twins(mesh_of(strategy), ranks, strategy, communicators="shared"),
            Twins(mesh_of(strategy), ranks, strategy, communicators="shared"),
        )
    made = Counter(ranks for ranks, _ in simulation.groups)
    assert set(made.values()) == {1}
    assert len(made) == (1 if strategy == "fsdp" else 3), "two axes, and all ranks for flags"


@on_ranks(2)
def test_sharding_makes_the_device_of_the_rank_current() -> None:
    """Otherwise each event of torch would switch to the device of another rank and back."""
    simulation = Simulation()
    own = {"LOCAL_RANK": str(DEVICE.index)}
    with simulated(simulation), mock.patch.dict(os.environ, own):
        sw.fully_shard(build("small").to(DEVICE))
        assert simulation.current_device == DEVICE.index


def test_a_single_rank_of_a_launcher_computes_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda: init("fake", store=FakeStore(), rank=0, world_size=1)
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    try:
        with simulated(Simulation()):
            model = sw.fully_shard(nn.Linear(4, 4))
            assert model(torch.randn(2, 4)).device == model.weight.device == DEVICE
    finally:
        dist.destroy_process_group()
