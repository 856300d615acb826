"""What each strategy shards over which axis, and which combinations are refused."""

import itertools
import re

import pytest

from shardwise.errors import PlanError
from shardwise.plan.strategy import (
    PRESETS,
    STRATEGIES,
    AxisPlacement,
    Level,
    Strategy,
    resolve_strategy,
)

WHOLE, CUT = AxisPlacement.REPLICATE, AxisPlacement.SHARD


def test_a_strategy_resolves_to_itself() -> None:
    row = Strategy("replicate", "replicate", "shard")
    assert resolve_strategy(row) is row


def test_strategies_are_found_by_their_name() -> None:
    for strategy in STRATEGIES.values():
        assert resolve_strategy(strategy.name) is strategy


@pytest.mark.parametrize(
    ("name", "parameters", "gradients", "optimizer"),
    [
        ("ddp", (WHOLE,), (WHOLE,), (WHOLE,)),
        ("zero1", (WHOLE,), (WHOLE,), (CUT,)),
        ("zero2", (WHOLE,), (CUT,), (CUT,)),
        ("fsdp", (CUT,), (CUT,), (CUT,)),
        ("hsdp", (WHOLE, CUT), (WHOLE, CUT), (WHOLE, CUT)),
        ("hfsdp", (WHOLE, CUT), (WHOLE, CUT), (CUT, CUT)),
    ],
)
def test_the_table(
    name: str,
    parameters: tuple[AxisPlacement, ...],
    gradients: tuple[AxisPlacement, ...],
    optimizer: tuple[AxisPlacement, ...],
) -> None:
    row = PRESETS[name]
    assert (row.parameters, row.gradients, row.optimizer) == (parameters, gradients, optimizer)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("fsdp", "fsdp"),
        ("zero3", "fsdp"),
        ("NO_SHARD", "ddp"),
        ("SHARD_GRAD_OP", "zero2"),
        ("FULL_SHARD", "fsdp"),
        ("HYBRID_SHARD", "hsdp"),
        ("_HYBRID_SHARD_ZERO2", "hsdp-zero2"),
    ],
)
def test_other_names_of_presets(name: str, preset: str) -> None:
    assert resolve_strategy(name) is PRESETS[preset]


def test_only_ddp_shards_nothing_and_only_hybrids_need_two_axes() -> None:
    rows = PRESETS.values()
    assert {row.name for row in rows if not row.shards} == {"ddp"}
    assert {row.name for row in rows if row.num_axes > 1} == {"hsdp", "hsdp-zero2", "hfsdp"}
    assert {row.name for row in rows if row.is_two_level} == {"hfsdp"}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match=r"strategy='zero9': expected one of ddp, zero1, zero2, fsdp, hsdp"
    ):
        resolve_strategy("zero9")


def test_one_axis_takes_zeros_four_stages_and_nothing_else() -> None:
    valid = {}
    for row in itertools.product(AxisPlacement, repeat=3):
        try:
            valid[row] = Strategy(*row).inner
        except PlanError as error:
            assert "; shard " in str(error), "it suggests a fix"  # noqa: PT017
    assert valid == {
        (WHOLE, WHOLE, WHOLE): Level.NOTHING,
        (WHOLE, WHOLE, CUT): Level.OPTIMIZER,
        (WHOLE, CUT, CUT): Level.GRADIENTS,
        (CUT, CUT, CUT): Level.PARAMETERS,
    }


def test_two_axes_take_every_pair_of_stages_with_the_higher_one_inside() -> None:
    pairs = list(itertools.product(AxisPlacement, repeat=2))
    valid = []
    for row in itertools.product(pairs, repeat=3):
        parameters, gradients, optimizer = row
        try:
            strategy = Strategy(parameters, gradients, optimizer)
        except PlanError:
            continue
        valid.append((strategy.outer, strategy.inner))
    assert sorted(valid) == [(o, i) for o in Level for i in Level if o <= i]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("shard", "replicate", "replicate"), "parameters are sharded over axis 0 and gradients"),
        (("replicate", "shard", "replicate"), "gradients are sharded over axis 0 and optimizer"),
        (("shard", "shard", ("shard", "shard")), "give each one placement, or each a pair"),
        (("cut", "shard", "shard"), "parameters='cut': expected 'shard' or 'replicate'"),
        (((), "shard", "shard"), "expected 'shard' or 'replicate', or a pair"),
        ((("replicate",) * 2,) * 2 + (("shard", "replicate"),), "swap the dimensions"),
    ],
)
def test_useless_combinations_are_refused(row: tuple[str, str, str], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Strategy(*row)
