"""Late streams: a missing wait or an early free results in a wrong number.

Work on a communication stream runs only when something waits for it, and pools fill memory with NaN
when it is allocated and when it is freed.
"""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.plan.strategy import PRESETS
from tests.covering import cover, pairwise
from tests.ranks import on_ranks, run_on
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import (
    DEVICE,
    Program,
    assert_trains_as_in_one_process,
    digest_of_training,
)
from tests.streams.simulation import Problem, Simulation

MODELS = (
    "stack",
    "gpt",
    "tied",
    "unused and reused",
    "checkpointed",
    "checkpointed, reentrant",
    "alternating",
)
OFFLOADS = (None, "all", "copies")
ROWS = pairwise(MODELS, tuple(PRESETS), (0, 1, 2, 3), (1, 2), OFFLOADS, (None, 0.5))
# `test_checker` covers the others.
OTHERS = ("zero1", "hsdp-zero2", "unused and reused", "checkpointed")
FIRST = cover([row for row in ROWS if not {*OTHERS} & {*row}], strength=1)


@pytest.mark.parametrize(
    "row", [row if row in FIRST else pytest.param(row, marks=pytest.mark.thorough) for row in ROWS]
)
def test_late_streams_train_as_one_process(row: tuple[object, ...]) -> None:
    name, strategy, prefetch, accumulate, offload, clip = row
    program = Program(
        name=str(name),
        strategy=str(strategy),
        prefetch=int(str(prefetch)),
        accumulate=int(str(accumulate)),
        offload=None if offload is None else str(offload),
        clip=None if clip is None else float(str(clip)),
    )
    ranks = 2 * PRESETS[program.strategy].num_axes
    run_on(ranks, assert_trains_as_in_one_process, program)


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["hsdp", pytest.param("hfsdp", marks=pytest.mark.thorough)])
def test_late_streams_on_a_permuted_mesh(strategy: str) -> None:
    assert_trains_as_in_one_process(Program(strategy=strategy, is_permuted=True))


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["dim", pytest.param("row", marks=pytest.mark.thorough)])
def test_late_streams_with_other_granularities(granularity: str) -> None:
    assert_trains_as_in_one_process(Program("stack", granularity=granularity))


@on_ranks(2)
@pytest.mark.parametrize("offload", ["all", "copies"])
def test_shards_on_the_host_have_what_gathered_has_written_back(offload: str) -> None:
    simulation, model = Simulation(is_late=True), build("stack")
    with simulated(simulation):
        simulation.current_device = DEVICE.index
        Program("stack", offload=offload).shard(model.to(DEVICE))
        with sw.gathered(model, write_back=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert bool((parameter.to_local() == 2.0).all())
    assert not [one for one in simulation.found if one.problem is not Problem.SYNC]


@on_ranks(2, thorough=(3,))
@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_late_streams_with_owners_of_matrices(optimizer: str) -> None:
    assert_trains_as_in_one_process(Program("stack", optimizer=optimizer))


WIRES = (
    sw.Wire("int8", "int4", block=8, error_feedback=True),
    sw.Wire("fp8", "int8", ranks_per_host=2),
)


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "wire", "accumulate"),
    [
        ("hsdp", WIRES[0], 1),
        pytest.param("hsdp", WIRES[0], 2, marks=pytest.mark.thorough),
        pytest.param("fsdp", WIRES[1], 2, marks=pytest.mark.thorough),
    ],
)
def test_late_streams_give_the_same_bits_with_a_wire(
    strategy: str, wire: sw.Wire, accumulate: int
) -> None:
    program = Program(strategy=strategy, accumulate=accumulate, options={"wire": wire})
    late, prompt = (digest_of_training(program, is_late=is_late) for is_late in (True, False))
    assert late == prompt


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        ("fsdp", None),
        *(
            pytest.param(*row, marks=pytest.mark.thorough)
            for row in product(("ddp", "zero2", "fsdp"), OFFLOADS)
        ),
    ],
)
def test_late_streams_in_low_precision_give_the_same_bits(
    strategy: str, offload: str | None
) -> None:
    program = Program(strategy=strategy, offload=offload, low_precision=True, accumulate=2)
    late, prompt = (digest_of_training(program, is_late=is_late) for is_late in (True, False))
    assert late == prompt
