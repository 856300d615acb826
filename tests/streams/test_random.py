"""Random programs of the fuzzer, on the simulated device; ``python -m tests.fuzz --streams``."""

import pytest
from hypothesis import given, settings

from tests.covering import leaving
from tests.fuzz.programs import (
    SEARCH,
    Branch,
    Case,
    Chain,
    Checkpoint,
    Classes,
    Complex,
    Conv,
    Dropped,
    Fault,
    Hidden,
    Hooked,
    Lookup,
    Manual,
    Mlp,
    Model,
    Norm,
    Odd,
    Residual,
    Sharding,
    Skip,
    Step,
    Tiny,
    cases,
)
from tests.streams.random_programs import assert_holds_on_streams

# Programs that revealed bugs.
FOUND = {
    "complex gradients": Case(
        Model(Chain((Complex(), Odd("complex128")))), Sharding(strategy="hsdp", units=1)
    ),
    "complex gradients beside quantized ones": Case(
        Model(Chain((Complex(),)), root_gain=False),
        Sharding(
            ranks=4,
            strategy="hsdp",
            replicas=1,
            units=Classes(("Complex", "Linear")),
            prefetch=0,
            wire="reductions",
        ),
        steps=(Step(update=False), Step(update=False)),
        rows=1,
    ),
    "a copy of an offloaded model on one device": Case(
        Model(Chain((Mlp(2, bias=True),))),
        Sharding(ranks=1, offload="all"),
        steps=(Step(before="copy"),),
    ),
    "two reductions of a unit in a backward that steps": Case(
        Model(Chain((Lookup(1),)), width=5, frozen=(18,), root_gain=False),
        Sharding(ranks=3),
        steps=(Step(losses=("sum",)),),
        in_backward=True,
    ),
    "backward recomputes a unit on the thread of its device": Case(
        Model(Chain((Tiny(), Checkpoint(Conv(2, 1), reentrant=False)))),
        Sharding(units=Classes(("Conv", "Conv1d"))),
        in_backward=True,
    ),
    "a step that is undone while shards are copied to the device": Case(
        Model(Chain((Lookup(11), Residual(Tiny()), Norm())), width=5, ties=((14, 16), (24, 11))),
        Sharding(ranks=1, units=5, prefetch=0, reshard=True, offload="all"),
        "adamw fused",
        (Step(("sum",), fault=Fault("parameter", 16, 2, rank=None)),),
        rows=3,
        seed=90,
        in_backward=True,
        in_slot=True,
    ),
    "ranks that exchange different amounts, compared after one has raised": Case(
        Model(Chain((Norm(),)), width=5, hooked=(11, 2)),
        Sharding(
            ranks=4,
            strategy="hsdp",
            replicas=2,
            units="auto",
            prefetch=2,
            reshard=False,
            unused="zeros",
            granularity="tensor",
            offload="all",
            casts=True,
        ),
        "muon",
        (
            Step(("abandoned",), "write", fault=Fault("parameter", 0, 1, rank=0)),
            Step(before="write", fault=Fault("accumulated", 11, 3, rank=1)),
        ),
        rows=3,
        seed=34,
        in_backward=True,
    ),
    "a step in backward that waits for a rank that raised": Case(
        Model(
            Chain(
                (
                    Skip(Residual(Mlp(7))),
                    Branch(Residual(Lookup(7)), Dropped(Residual(Lookup(5)))),
                    Hooked(Skip(Residual(Hidden()))),
                    Hidden(),
                )
            ),
            width=5,
            frozen=(23,),
            hooked=(8,),
        ),
        Sharding(
            3,
            "FULL_SHARD",
            2,
            Manual(((27, False), (12, True))),
            prefetch=3,
            reshard=False,
            offload="but parameters",
            casts=True,
        ),
        "adamw foreach",
        (
            Step(("sum",), fault=Fault("before forward", 0, 3, rank=None)),
            Step(("sum",)),
            Step(before="gathered", fault=Fault("stepped", 28, 1, rank=0)),
            Step(fault=Fault("before forward", 1, 2, rank=None)),
        ),
        seed=12,
        in_backward=True,
        in_slot=True,
    ),
}


LONG = (
    "two reductions of a unit in a backward that steps",
    "a step in backward that waits for a rank that raised",
)


@pytest.mark.parametrize("name", leaving(LONG, FOUND))
def test_what_was_found_holds(name: str) -> None:
    assert_holds_on_streams(FOUND[name])


@given(cases())
@settings(SEARCH, derandomize=True, max_examples=2)
def test_random_programs(case: Case) -> None:
    assert_holds_on_streams(case)


@pytest.mark.thorough
@given(cases())
@settings(SEARCH, derandomize=True, max_examples=40)
def test_more_random_programs(case: Case) -> None:
    assert_holds_on_streams(case)
