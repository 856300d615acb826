"""A model that is gathered whole, although its blocks could be units, warns once."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks

MESSAGE = (
    r"Stack is one unit.* 3 repeated blocks \(Block: layers\.0 to layers\.2\); "
    'pass units="auto"'
)


def warnings_of(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(2, WIDTH)).sum().backward()
    return [str(one.message) for one in caught]


@on_ranks(2)
def test_a_model_with_blocks_and_without_units_warns_at_its_first_forward() -> None:
    model = sw.fully_shard(Stack(depth=3))
    copied = copy.deepcopy(model)
    for one in (model, copied):
        with pytest.warns(UserWarning, match=MESSAGE):
            one(torch.randn(2, WIDTH)).sum().backward()
        assert not warnings_of(one)
        assert not one._forward_pre_hooks
        assert not warnings_of(one.double().float()), "nor after a conversion"


@on_ranks(2)
@pytest.mark.parametrize("options", [{"units": "auto"}, {"units": Block}, {"strategy": "ddp"}])
def test_others_do_not(options: dict[str, Any]) -> None:
    assert not warnings_of(sw.fully_shard(Stack(depth=3), **options))


@on_ranks(2)
def test_a_block_that_becomes_part_of_a_model_does_not() -> None:
    """Its own parts may repeat, too."""
    model = nn.Sequential(*(Stack(depth=2) for _ in range(2)))
    for stack in model:
        sw.fully_shard(stack)
    assert not warnings_of(sw.fully_shard(model))


@on_ranks(2)
def test_a_model_without_repeated_blocks_does_not() -> None:
    assert not warnings_of(sw.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def test_one_rank_does_not() -> None:
    assert not warnings_of(sw.fully_shard(Stack(depth=3)))
