"""Before torch 2.12, storages cannot be swapped: buffers get memory from the allocator."""

from contextlib import ExitStack
from unittest import mock

import pytest

from shardwise.plan.strategy import PRESETS
from shardwise.runtime import buffers, gradients, memory
from tests.ranks import run_on
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import Program, assert_trains_as_in_one_process, train
from tests.streams.simulation import Problem, Simulation

PROGRAMS = (
    Program("stack", prefetch=2),
    Program("gpt", strategy="zero2", accumulate=2),
    Program("alternating", prefetch=2),
    Program(strategy="hsdp", offload="all"),
    Program("checkpointed", strategy="hfsdp", clip=0.5),
    Program("tied", granularity="dim", prefetch=0),
    Program("unused and reused", offload="copies"),
)
FEW = PROGRAMS[:4]


@pytest.mark.parametrize(
    "program",
    [one if one in FEW else pytest.param(one, marks=pytest.mark.thorough) for one in PROGRAMS],
    ids=str,
)
def test_late_streams_and_the_checker_without_swaps(program: Program) -> None:
    ranks = 2 * PRESETS[program.strategy].num_axes
    run_on(ranks, without_swaps, program)


def without_swaps(program: Program) -> None:
    with ExitStack() as stack:
        for module in (buffers, gradients, memory):
            stack.enter_context(mock.patch.object(module, "CAN_SWAP", False))
        assert_trains_as_in_one_process(program)
        simulation = Simulation()
        with simulated(simulation):
            train(program, simulation, build(program.name))
        found = [str(one) for one in simulation.found if one.problem is not Problem.SYNC]
        assert not found, "\n".join(found[:5])
