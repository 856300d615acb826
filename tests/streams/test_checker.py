"""The checker finds no problem in shardwise, and finds each bug that is introduced."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise._private import can_swap_storages
from shardwise.comm.api import MemoryKind
from shardwise.plan.strategy import PRESETS
from tests.covering import cover, pairwise
from tests.streams.checker import check, check_ranks
from tests.streams.programs import Program
from tests.streams.seeds import BUGS
from tests.streams.simulation import Found, Problem

# The places where the host may wait in a steady step, and why.
MAY_WAIT = {
    "finish_offload": "shards are on the host, where the optimizer reads the gradients",
    "reductions.py:": "shards are on the host, and their norms are gathered on the device",
    "unused.py:": "this rank used not all of its parameters, and asks whether others did",
}
CLEAN = {
    "clipped": Program(clip=0.5),
    "chunks of a dim": Program(granularity="dim"),
    "rows": Program(granularity="row"),
    "zeros for unused parameters": Program("unused and reused", unused="zeros"),
    "unused parameters, ddp": Program("unused and reused", strategy="ddp"),
    "resharded to two ranks": Program(options={"reshard_after_forward": 2}),
    "permuted": Program(is_permuted=True),
    "permuted hsdp": Program(strategy="hsdp", is_permuted=True),
    "permuted hfsdp": Program(strategy="hfsdp", is_permuted=True),
    "activations": Program("wide", offloads_activations=True),
    "muon": Program(optimizer="muon"),
    "8-bit Adam": Program(optimizer="adam8bit", granularity="row"),
    "soap, hsdp": Program(optimizer="soap", strategy="hsdp"),
    "wire": Program(options={"wire": sw.Wire("int8", "int4", block=8, error_feedback=True)}),
    "one communicator": Program(options={"communicators": "shared"}),
    "one communicator, hsdp": Program(strategy="hsdp", options={"communicators": "shared"}),
    "reproducible": Program(accumulate=2, clip=0.5, options={"reproducible": 8}),
    "reproducible ddp": Program(strategy="ddp", accumulate=2, options={"reproducible": 8}),
    "reproducible hsdp": Program(strategy="hsdp", clip=0.5, options={"reproducible": 4}),
    "reproducible hfsdp": Program(strategy="hfsdp", is_permuted=True, options={"reproducible": 4}),
    "gathered in vain": Program("alternating", prefetch=3, steps=4),
}
MODELS = ("stack", "gpt", "tied", "checkpointed", "checkpointed, reentrant", "unused and reused")
ROWS = pairwise(
    MODELS,
    tuple(PRESETS),
    (0, 1, 2, 3),
    (1, 2),
    (None, "all", "copies", "device"),
    (False, True),
)


def assert_clean(program: Program, *, on_both: bool = True) -> None:
    ranks = 4 if PRESETS[program.strategy].num_axes == 2 or program.options else 2
    of = (0, ranks - 1) if on_both else (ranks - 1,)
    for verdict in check_ranks(program, ranks, of=of):
        found = [str(one) for one in verdict.found if not may_wait(one, program)]
        assert not found, "\n".join(found[:5])


def may_wait(found: Found, program: Program) -> bool:
    if found.problem is not Problem.SYNC:
        return False
    places = {name for name in MAY_WAIT if name in found.text}
    return bool(places) and (program.offload is not None or places == {"unused.py:"})


@pytest.mark.parametrize("on_both", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found(name: str, on_both: bool) -> None:
    assert_clean(CLEAN[name], on_both=on_both)


@pytest.mark.parametrize(
    ("row", "on_both"),
    [
        *((row, False) for row in cover(ROWS, strength=1)),
        *(pytest.param(row, True, marks=pytest.mark.thorough) for row in ROWS),
    ],
)
def test_nothing_is_found_with_any_options(row: tuple[object, ...], on_both: bool) -> None:
    name, strategy, prefetch, accumulate, offload, low_precision = row
    assert_clean(
        Program(
            name=str(name),
            strategy=str(strategy),
            prefetch=int(str(prefetch)),
            accumulate=int(str(accumulate)),
            offload=None if offload is None else str(offload),
            low_precision=bool(low_precision),
        ),
        on_both=on_both,
    )


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    if bug.program.memory is not MemoryKind.OWN and not can_swap_storages():
        pytest.skip("torch before 2.13 has no registered memory")
    if bug.problem is Problem.ORDER:
        verdicts = check_ranks(bug.program, bug.num_ranks, bug.install)
        assert all(bug.problem in verdict.problems for verdict in verdicts)
        return
    verdict = check(bug.program, bug.rank, bug.num_ranks, bug.install)
    if bug.problem is None:
        assert verdict.digest != check(bug.program, bug.rank, bug.num_ranks).digest
    else:
        assert bug.problem in verdict.problems


def test_the_documentation_lists_the_bugs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text(encoding="utf-8")
    for name, bug in BUGS.items():
        assert f"| {name} | {bug.problem or 'wrong numbers'} |" in page
