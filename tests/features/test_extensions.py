"""Parameters whose classes define what is gathered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.runtime.kept_tensors import ParameterViews
from shardwise.tensor.sharding import local_of
from tests.fsdp.extended import Pair, Wrapper, replace_weights
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import runtime_of

DEPTH = 4


def stack(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(depth=DEPTH)
    replace_weights(model, make)
    return sw.fully_shard(model, units=Block)


@contextmanager
def counting_notes() -> Iterator[list[object]]:
    """The units whose storages are searched."""
    noted: list[object] = []
    note = ParameterViews._note

    def count(views: ParameterViews, unit: Any) -> bool:
        noted.append(unit)
        return note(views, unit)

    with mock.patch.object(ParameterViews, "_note", count):
        yield noted


@on_ranks(2)
def test_storages_of_units_are_noted_once() -> None:
    model = stack(lambda weight: Pair(weight.clone(), weight.clone()))
    model(torch.randn(2, WIDTH))
    with counting_notes() as noted:
        model(torch.randn(2, WIDTH))
    assert not noted


@on_ranks(2)
def test_a_state_dict_from_inside_gathered_keeps_its_memory() -> None:
    model = stack(lambda weight: Pair(weight.clone(), weight.clone()))
    for _ in range(2):
        with sw.gathered(model):
            state = model.state_dict()
            expected = {name: value.clone() for name, value in state.items()}
        model(torch.randn(2, WIDTH))
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


@on_ranks(2)
def test_shards_in_16_bits_are_not_widened() -> None:
    """As those of plain parameters are: the class decides what it stores."""
    model = Stack(depth=1).bfloat16()
    replace_weights(model, lambda weight: Pair(weight.clone(), weight.clone()))
    sw.fully_shard(model, units=Block)
    for _ in range(2):
        model(torch.randn(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
    extended = [p for p in model.parameters() if isinstance(local_of(p), Pair)]
    planned = [one for unit in runtime_of(model).plan.units for one in unit.parameters]
    assert {p.dtype for p in extended} == {torch.bfloat16}
    assert {one.dtype for one in planned if one.is_extended} == {"bfloat16"}


class Switches(Wrapper):
    """Sends float32 at first, and later another dtype."""

    dtype_sent = torch.float32

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_.to(self.dtype_sent),), None  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, gathered: Any, _metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = gathered[0].to(dtype)
        return (whole, (whole,)) if out is None else out.data.copy_(whole)


@on_ranks(2)
def test_a_class_that_later_sends_something_else_is_named() -> None:
    model = stack(Switches)
    for _ in range(2):
        model(torch.randn(2, WIDTH)).sum().backward()
    expected = r"first\.weight: .* a Switches returned .*bfloat16.*for the first gather .*float32"
    with (
        mock.patch.object(Switches, "dtype_sent", torch.bfloat16),
        pytest.raises(sw.PlanError, match=expected),
    ):
        model(torch.randn(2, WIDTH))
    model(torch.randn(2, WIDTH)).sum().backward()
