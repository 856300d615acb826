"""Strategies are rows with several names."""

import pytest

from shardwise.errors import PlanError
from shardwise.plan.strategy import (
    DDP,
    FSDP,
    HSDP,
    HSDP_ZERO2,
    STRATEGIES,
    ZERO2,
    Placement,
    Strategy,
    resolve_strategy,
)


@pytest.mark.parametrize("name", ["fsdp", "zero3", "FULL_SHARD"])
def test_names_of_full_sharding(name: str) -> None:
    assert resolve_strategy(name) is FSDP


def test_a_row_stands_for_itself() -> None:
    assert resolve_strategy(FSDP) is FSDP


def test_rows_are_known_by_their_own_name() -> None:
    for strategy in STRATEGIES.values():
        assert resolve_strategy(strategy.name) is strategy


def test_full_sharding_shards_everything() -> None:
    assert {FSDP.parameters, FSDP.gradients, FSDP.optimizer} == {Placement.SHARD}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NO_SHARD", DDP),
        ("SHARD_GRAD_OP", ZERO2),
        ("FULL_SHARD", FSDP),
        ("HYBRID_SHARD", HSDP),
        ("_HYBRID_SHARD_ZERO2", HSDP_ZERO2),
    ],
)
def test_names_of_fsdp1(name: str, row: Strategy) -> None:
    assert resolve_strategy(name) is row


def test_only_ddp_shards_nothing_and_only_hybrids_want_replicas() -> None:
    rows = STRATEGIES.values()
    assert {row.name for row in rows if not row.shards} == {"ddp"}
    assert {row.name for row in rows if row.replicas} == {"hsdp", "hsdp-zero2"}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match=r"strategy='zero9': expected one of ddp, zero2, fsdp, zero3, hsdp"
    ):
        resolve_strategy("zero9")


def test_a_row_that_cannot_be_run_is_refused() -> None:
    row = Strategy("odd", Placement.SHARD, Placement.REPLICATE, Placement.REPLICATE)
    with pytest.raises(PlanError, match="cannot be run yet"):
        resolve_strategy(row)
