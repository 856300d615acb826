"""With every granularity, models train as in one process, and no granule is cut."""

import copy
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.plan import layout
from shardwise.plan.granularity import Granularities
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import WIDTH, Block, Stack, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import assert_close, assert_equal_training, own_part, runtime_of


@on_ranks(3)
def test_units_with_two_buffers() -> None:
    with patch.object(layout, "SPLIT_BYTES", 0):  # small models would save too little
        for name in ("stack", "conv", "tied"):
            model = assert_equal_training(name, granularity="row")
            assert any(len(unit.layouts) > 1 for unit in runtime_of(model).plan.units), name
            assert_equal_training(name, granularity="row", accumulate=2, unused="zeros")


@on_ranks(3)
def test_a_rank_holds_whole_rows() -> None:
    """Rows of 7: starts are at multiples of 8 elements, so eight rows stay together."""
    model = nn.Sequential(nn.Linear(7, 50), nn.Linear(50, 7)).double()
    expected = [p.detach().clone() for p in model.parameters()]
    sw.fully_shard(model, granularity={"*.weight": "row"})
    cut = 0
    for whole, parameter in zip(expected, model.parameters(), strict=True):
        assert isinstance(parameter, ShardedTensor)
        run, row = parameter.sharding.run, whole[0].numel()
        assert_close(parameter.detach(), whole, "full tensor")
        if whole.ndim == 1 or not run:
            continue
        assert run.start % row == run.stop % row == 0
        cut += len(run) < whole.numel()
        rows = whole[run.start // row : run.stop // row]
        assert torch.equal(parameter.to_local().view(-1, row), rows)
    assert cut, "some matrix is on several ranks"


def test_a_tensor_is_on_one_rank() -> None:
    held = run_on(4, _held_elements, "tensor")
    for by_rank in zip(*held, strict=True):
        assert sum(count > 0 for count in by_rank) == 1


@on_ranks(4)
def test_parameters_keep_the_order_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 30), nn.Linear(30, 1)).double()
    names = [name for name, _ in model.named_parameters()]
    sw.fully_shard(model, granularity="tensor")
    extents = runtime_of(model).plan.units[0].layouts[0].extents
    assert [extent.parameter.name for extent in extents] != names, "the planner reorders them"
    assert [name for name, _ in model.named_parameters()] == names
    assert [spec.name for spec in runtime_of(model).plan.units[0].parameters] == names


@on_ranks(2)
def test_a_choice_for_a_block_stays() -> None:
    model = build("stack")
    for layer in model.layers:
        sw.fully_shard(layer, granularity="row")
    sw.fully_shard(model, granularity={"first.weight": "tensor"})
    chosen = {
        name: p.sharding.extent.parameter.granularity
        for name, p in model.named_parameters()
        if isinstance(p, ShardedTensor)
    }
    assert {chosen.pop(f"layers.{i}.up.weight") for i in range(3)} == {"row"}
    assert chosen["layers.0.down.bias"] == "row"
    assert (chosen["first.weight"], chosen["first.bias"]) == ("tensor", "element")
    batch = torch.randn(12, WIDTH).double()
    reference = build("stack")
    assert_close(model(own_part(batch)).detach(), own_part(reference(batch)).detach(), "output")


@on_ranks(2)
def test_a_copy_is_cut_alike() -> None:
    model = sw.fully_shard(build("stack"), units=Block, granularity="row")
    twin = copy.deepcopy(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(one, ShardedTensor)
        assert isinstance(other, ShardedTensor)
        assert one.sharding.runs == other.sharding.runs
        assert torch.equal(one.to_local(), other.to_local())


def test_costly_padding_is_warned_of_once() -> None:
    assert run_on(4, _warnings) == [1, 0, 0, 0]


def test_a_mistake_is_named() -> None:
    with pytest.raises(sw.PlanError, match=r"granularity='rows'.*expected 'element', 'row'"):
        sw.fully_shard(Stack(), granularity="rows")  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match=r"'\*\.wieght'.*matches no parameter.*first\.weight"):
        sw.fully_shard(Stack(), granularity={"*.wieght": "row"})


def _held_elements(granularity: Granularities) -> list[int]:
    model = sw.fully_shard(build("stack"), units=Block, granularity=granularity)
    locals_ = [p.to_local() for p in model.parameters() if isinstance(p, ShardedTensor)]
    return [local.numel() for local in locals_]


def _warnings() -> int:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(10, 10))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.fully_shard(model, granularity="tensor")
    for warning in caught:
        assert "padding" in str(warning.message)
        assert "0.weight [1000, 1000] by tensor" in str(warning.message)
        assert "granularity 'row' for 0.weight: 0." in str(warning.message)
        assert warning.filename == __file__
    return len(caught)


@on_ranks(2)
def test_ranks_that_choose_otherwise_are_told() -> None:
    chosen: Granularities = "row" if dist.get_rank() else "element"
    with pytest.raises(sw.PlanError, match="ranks 0 and 1 have different sharding plans"):
        sw.fully_shard(build("stack"), granularity=chosen)
