"""The ``device_id`` of FSDP1 on the simulated device."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.fsdp import FullyShardedDataParallel, options
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Simulation


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """The devices of a single rank."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with simulated(made := Simulation()):
            yield made
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device_id", [1, DEVICE, torch.device("cuda"), "cuda", None])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_the_model_computes_on_it(
    device_id: int | torch.device | None, simulation: Simulation
) -> None:
    """Without an index, and without the argument, on the device that the program has set."""
    is_named = device_id in (1, DEVICE)
    simulation.current_device = 0 if is_named else DEVICE.index
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=device_id)
    assert model.compute_device == DEVICE
    assert {p.device for p in model.parameters()} == {DEVICE}
    assert model(torch.randn(2, 4)).device == DEVICE
    assert simulation.current_device == DEVICE.index


def test_the_first_exchange_of_ranks_finds_it_current(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange on another rank's device would create a context there."""
    monkeypatch.setenv("LOCAL_RANK", str(DEVICE.index))
    simulation.current_device = 0
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    sw.fully_shard(model)
    assert simulation.current_device == DEVICE.index


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    for device_id in (0, torch.device("cuda")):
        with pytest.raises(sw.PlanError, match="this machine has no accelerator"):
            options.resolve_device(device_id)
    assert options.resolve_device(torch.device("cpu")) == torch.device("cpu")
