"""A model sleeps and wakes on the simulated device: no races, the same bits, constant bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.comm.api import MemoryKind
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import DEVICE, Program, digest, digest_of_training, train
from tests.streams.simulation import Problem, Simulation

PROGRAMS = {
    "fsdp": Program(steps=3),
    "hsdp": Program(strategy="hsdp", steps=3),
    "zero1": Program(strategy="zero1", steps=3),
    "ddp": Program(strategy="ddp", steps=3),
    "dim": Program(granularity="dim", steps=3),
    "offloaded": Program(offload="copies", steps=3),
    "registered": Program(memory=MemoryKind.REGISTERED, steps=3),
    "symmetric": Program(memory=MemoryKind.SYMMETRIC, steps=3),
}
ON_RANKS = [(name, 4 if "hsdp" in name else 2) for name in PROGRAMS]


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"), covered_first(ON_RANKS, leave=("zero1", "ddp", "registered"))
)
def test_sleep_on_late_streams_changes_no_bit(name: str) -> None:
    program = PROGRAMS[name]
    asleep: list[int] = []
    simulation = Simulation(is_late=True)

    def rest(model: nn.Module, _step: int) -> None:
        for _ in range(2):
            report = sw.sleep(model)
            assert report.freed_bytes > 0
            asleep.append(device_bytes(simulation))
            sw.wake(model)

    assert_changes_no_bit(program, simulation, rest)
    assert simulation.num_emptied_caches == len(asleep), "other processes need the memory"
    for first in range(0, len(asleep), 2):  # between two steps; gradients and states differ later
        assert len(set(asleep[first : first + 2])) == 1
    assert asleep[2:4] == asleep[4:6]


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"), covered_first(ON_RANKS, leave=("hsdp", "dim", "symmetric"))
)
def test_a_model_that_moves_to_the_host_sleeps_until_it_is_back(name: str) -> None:
    """Its optimizer stays where it is, and what was in host memory."""
    program, simulation = PROGRAMS[name], Simulation(is_late=True)
    sleeps = program.offload is None

    def move(model: nn.Module, _step: int) -> None:
        before, first = device_bytes(simulation), next(model.parameters())
        for _ in range(2):
            model.to("cpu")
            assert_are_on(model, torch.device("cpu"))
        assert next(model.parameters()) is first
        if sleeps:
            assert device_bytes(simulation) < before
            with pytest.raises(sw.StepError, match=r"model\.to\(device\) if"):
                model.half()
        model.load_state_dict(model.state_dict())
        model.to(DEVICE)
        if sleeps:
            assert_are_on(model, DEVICE)

    assert_changes_no_bit(program, simulation, move)


@dataclass(frozen=True)
class Kept(Program):
    """A program whose optimizer can be found in ``made``."""

    made: list[torch.optim.Optimizer] = field(default_factory=list)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made.append(super().make_optimizer(model))
        return self.made[-1]


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp", "zero1", "ddp", "dim"])
def test_states_that_a_program_moves_as_well_come_back(name: str) -> None:
    """As verl does between steps, while another engine generates."""
    program, simulation = Kept(**vars(PROGRAMS[name])), Simulation(is_late=True)
    kept: list[int] = []

    def move(model: nn.Module, _step: int) -> None:
        [optimizer] = program.made
        for device in (torch.device("cpu"), DEVICE):
            model.to(device)
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.to(device, non_blocking=True)
            if device.type == "cpu":
                kept.append(device_bytes(simulation))

    assert_changes_no_bit(program, simulation, move)
    assert kept[1] == kept[2], "none was left behind"
    assert kept[1] - kept[0] < 100, "no state but the numbers of steps"


def assert_changes_no_bit(
    program: Program, simulation: Simulation, after_backward: Callable[[nn.Module, int], None]
) -> None:
    """Train with ``after_backward`` and without it; check that there are no races."""
    with simulated(simulation):
        found = digest(train(program, simulation, build(program.name), after_backward))
    problems = [str(one) for one in simulation.found if one.problem is not Problem.SYNC]
    assert not problems, "\n".join(problems[:5])
    assert found == digest_of_training(program, is_late=True)


def device_bytes(simulation: Simulation) -> int:
    with _disable_current_modes():
        return simulation.memory.device_bytes


def assert_are_on(model: nn.Module, device: torch.device) -> None:
    """Check where parameters and gradients are, and say that they are."""
    for parameter in model.parameters():
        for one in (parameter, parameter.grad):
            assert one is None or one.device == local_of(one).device == device
