"""Warnings show the line of the user's program, on whatever way they were reached."""

import ast
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import fsdp
from shardwise.fsdp import FullyShardedDataParallel
from shardwise.fsdp.wrap import ModuleWrapPolicy
from tests.models import Block
from tests.ranks import on_ranks

SOURCE = Path(sw.__file__).parent


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def set_state_dict_type() -> int:
    kind = fsdp.StateDictType.FULL_STATE_DICT
    FullyShardedDataParallel.set_state_dict_type(FullyShardedDataParallel(blocks()), kind)
    return line() - 1


def state_dict_type() -> int:
    kind = fsdp.StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(FullyShardedDataParallel(blocks()), kind):
        return line() - 1


def ignore_everything() -> int:
    FullyShardedDataParallel(model := blocks(), ignored_modules=[model])
    return line() - 1


def wrap_containers() -> int:
    FullyShardedDataParallel(nn.ModuleList([Block()]))
    return line() - 1


def mix_precision() -> int:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    mixed = fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    policy = ModuleWrapPolicy({nn.Linear})
    FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=mixed)
    return line() - 1


def clip_nothing() -> int:
    FullyShardedDataParallel(blocks()).clip_grad_norm_(1.0)
    return line() - 1


def step_without_gradients() -> int:
    torch.optim.SGD(sw.fully_shard(blocks()).parameters(), lr=0.1).step()
    return line() - 1


def add_a_parameter() -> int:
    model = fsdp.fully_shard(blocks())
    model.append(Block().to(next(model.parameters()).dtype))
    model(torch.zeros(2, 6))
    return line() - 1


def build_different_values() -> int:
    torch.manual_seed(torch.distributed.get_rank())
    fsdp.fully_shard(nn.Linear(4, 4))
    return line() - 1


@pytest.mark.parametrize(
    "program",
    [
        set_state_dict_type,
        state_dict_type,
        ignore_everything,
        wrap_containers,
        mix_precision,
        clip_nothing,
        step_without_gradients,
        add_a_parameter,
        build_different_values,
    ],
)
@on_ranks(2)
def test_a_warning_shows_the_line_of_the_caller(program: Callable[[], int]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = program()
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, expected)}


def test_every_warning_is_of_the_caller() -> None:
    """No module calls ``warnings.warn``, whose ``stacklevel`` is right on one way only."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called: Any = node.func if isinstance(node, ast.Call) else None
            assert ast.unparse(called) != "warnings.warn" if called else True, file
