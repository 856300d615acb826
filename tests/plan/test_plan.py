"""A plan: arguments are checked, numbers add up."""

import pytest
import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.strategy import PRESETS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.Sequential(Block(), Block())


def test_defaults() -> None:
    plan = make_plan(Model(), world_size=2)
    assert [unit.label for unit in plan.units] == ["Model"]
    assert (plan.world_size, plan.prefetch, plan.strategy) == (2, 1, PRESETS["fsdp"])


@pytest.mark.parametrize(
    ("reshard_after_forward", "expected"),
    [(None, [False, True, True]), (True, [True] * 3), (False, [False] * 3)],
)
def test_every_unit_but_the_root_is_resharded_by_default(
    reshard_after_forward: bool | None, expected: list[bool]
) -> None:
    plan = make_plan(
        Model(), world_size=2, units=Block, reshard_after_forward=reshard_after_forward
    )
    assert [unit.reshard for unit in plan.units] == expected


def test_manual_units_join_in_module_order() -> None:
    plan = make_plan(
        Model(),
        world_size=2,
        units=Block,
        manual={
            "blocks.1.fc": UnitOptions(False),
            "embedding": UnitOptions(None),
            "": UnitOptions(True),
            "blocks.0": UnitOptions(False),
        },
    )
    assert {unit.name: unit.reshard for unit in plan.units} == {
        "": True,
        "embedding": True,
        "blocks.0": False,
        "blocks.1": True,
        "blocks.1.fc": False,
    }
    assert [unit.name for unit in plan.units] == [
        "",
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.1.fc",
    ]
    assert [unit.parent for unit in plan.units] == [None, 0, 0, 0, 3]


def test_the_numbers_of_one_process() -> None:
    plan = make_plan(Model(), world_size=2, units=Block)
    assert plan.num_parameters == 21 + 2 * 20
    assert plan.parameter_bytes == 4 * plan.num_parameters


def test_the_numbers_of_one_rank() -> None:
    """21 elements, and 20 (15, padded to 16, and 5), are 2 x 16, at 8 elements a step."""
    plan = make_plan(Model(), world_size=2, units=Block)
    assert [unit.shard_bytes for unit in plan.units] == [64, 64, 64]
    assert [unit.gradient_shard_bytes for unit in plan.units] == [64, 64, 64]
    assert plan.shard_bytes == 3 * 64


def test_one_rank_keeps_everything_and_its_padding() -> None:
    plan = make_plan(Model().to(torch.float64), world_size=1, units=Block)
    assert sum(unit.gathered_bytes for unit in plan.units) == 0, "parameters are whole already"
    assert 0 <= plan.shard_bytes - plan.parameter_bytes < 16 * 2 * 5


@pytest.mark.parametrize(("strategy", "frees"), [("fsdp", True), ("zero2", False), ("hsdp", True)])
def test_a_strategy_that_keeps_parameters_whole_frees_no_unit(strategy: str, frees: bool) -> None:
    plan = make_plan(Model(), world_size=2, units=Block, strategy=strategy)
    assert [unit.reshard for unit in plan.units] == [False, frees, frees]
    forced = make_plan(Model(), world_size=2, strategy=strategy, reshard_after_forward=True)
    assert forced.units[0].reshard


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    assert make_plan(model, world_size=4, units="auto") == make_plan(
        Model(), world_size=4, units="auto"
    )


def test_negative_prefetch_is_refused() -> None:
    with pytest.raises(PlanError, match="prefetch=-1: expected 0 or more"):
        make_plan(Model(), world_size=2, prefetch=-1)


def test_names_and_units_are_checked() -> None:
    with pytest.raises(PlanError, match="strategy='ddq'"):
        make_plan(Model(), world_size=2, strategy="ddq")
    with pytest.raises(PlanError, match="matches no module"):
        make_plan(Model(), world_size=2, units=nn.Conv2d)


def test_a_plan_proves_itself() -> None:
    plan = make_plan(Model(), world_size=2, units=Block)
    with pytest.raises(AssertionError, match="root is a unit"):
        Plan((), PRESETS["fsdp"], world_size=2, prefetch=1)
    with pytest.raises(AssertionError, match="root comes first"):
        Plan(plan.units[1:], PRESETS["fsdp"], world_size=2, prefetch=1)
