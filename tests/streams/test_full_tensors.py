"""Whole tensors are gathered and published on the simulated device without a race."""

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.tensor.sharding import local_of, sharding_of
from tests.ranks import on_ranks
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import Program, digest, digest_of_training, train
from tests.streams.simulation import Problem, Simulation
from tests.weights.memory_target import MemoryTarget

PROGRAMS = {
    "fsdp": Program(),
    "hsdp": Program(strategy="hsdp"),
    "dim": Program(granularity="dim"),
    "offloaded": Program(offload="all"),
}


def check(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Compare whole tensors on the host with this rank's shards."""
    with _disable_current_modes():
        for name, parameter in model.named_parameters():
            sharding = sharding_of(parameter)
            assert sharding is not None
            own = sharding.own_part_of(whole[name])
            assert (own.reshape(-1) == local_of(parameter).reshape(-1)).all(), name


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"), [(name, 4 if name == "hsdp" else 2) for name in PROGRAMS]
)
def test_gathers_on_late_streams(name: str) -> None:
    program, target = PROGRAMS[name], MemoryTarget()
    simulation = Simulation(is_late=True)

    def send(model: nn.Module, step: int) -> None:
        gathered: dict[str, Tensor] = {}
        for key, tensor in sw.full_tensors(model, bucket_bytes=800, to=1 if step else "all"):
            gathered[key] = tensor * 1  # used while the next bucket is gathered
        if not step or dist.get_rank() == 1:
            check(model, {key: tensor.cpu() for key, tensor in gathered.items()})
        version = sw.publish(model, target, bucket_bytes=800)
        assert version == step + 1
        if dist.get_rank() == 0:
            check(model, target.tensors)

    with simulated(simulation):
        trained = digest(train(program, simulation, build(program.name), send))
    found = [str(one) for one in simulation.found if one.problem is not Problem.SYNC]
    assert not found, "\n".join(found[:5])
    assert trained == digest_of_training(program, is_late=True)
