"""With granularity "dim", models train as in one process, and have FSDP2's placements."""

import copy
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from tests.covering import covered_first
from tests.models import Block, Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_equal_steps,
    options_of,
    step_all,
)


@on_ranks(2, 3)
@pytest.mark.parametrize("dim", [None, 1])
def test_parameters_and_gradients_are_those_of_fsdp2(dim: int | None) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6, bias=False))
    ours, theirs = plain, copy.deepcopy(plain)

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if dim is not None and parameter.ndim > dim else None

    for module in (ours[0], ours[2], ours):
        sw.fully_shard(module, mesh=mesh, shard_placement_fn=place, granularity="dim")
    for module in (theirs[0], theirs[2], theirs):
        fsdp2.fully_shard(module, mesh=mesh, shard_placement_fn=place)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(4, 6)
        for model in (ours, theirs):
            model(batch).square().mean().backward()
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            for one, other in ((mine.detach(), its.detach()), (mine.grad, its.grad)):
                assert isinstance(one, DTensor)
                assert isinstance(other, DTensor)
                assert (one.placements, one.device_mesh) == (other.placements, other.device_mesh)
                assert one.stride() == other.stride()
                torch.testing.assert_close(one.to_local(), other.to_local())
        step_all(optimizers)


@on_ranks(2)
def test_replicas_are_replicated_dtensors() -> None:
    model = sw.fully_shard(Stack(), strategy="ddp", granularity="dim")
    assert all(p.placements == (Replicate(),) for p in model.parameters())  # type: ignore[attr-defined]


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "granularity", "wraps"),
    covered_first(product(("assign", "to_empty"), ("dim", "element"), (False, True))),
)
def test_parameters_on_the_meta_device_are_dtensors(
    how: str, granularity: Any, wraps: bool
) -> None:
    """FSDP2's order: shard, get storage and values, train."""
    reference = build("stack")
    with torch.device("meta"):
        model = build("stack")
    if wraps:  # whose ``named_parameters()`` leaves out its own name
        for one in (reference, model):
            one.layers = nn.ModuleList(map(checkpoint_wrapper, one.layers))
    for layer in (*model.layers, model):
        sw.fully_shard(layer, granularity=granularity)
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    if how == "assign" and granularity == "dim":
        values = {
            name: distribute_tensor(value, p.device_mesh, p.placements)
            for (name, value), p in zip(
                reference.state_dict().items(), model.parameters(), strict=True
            )
            if isinstance(p, DTensor)
        }
        model.load_state_dict(values, assign=True)
    elif how == "assign":
        model.load_state_dict(copy.deepcopy(reference.state_dict()), assign=True)
    else:
        model.to_empty(device="cpu")
        with torch.no_grad(), sw.gathered(model, write_back=True):
            for p, value in zip(model.parameters(), reference.parameters(), strict=True):
                p.copy_(value)
    for _ in range(2):
        assert_equal_steps(model, reference, 1, zeroes=True)
        model.to("cpu")


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["dim", "element"])
def test_a_model_may_be_converted_between_steps(granularity: Any) -> None:
    reference, model = build("tied").float(), build("tied").float()
    sw.fully_shard(model, units=Block, granularity=granularity)
    model.double()
    reference.double()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert_equal_steps(model, reference, make_optimizer=adamw)


@on_ranks(2)
def test_different_values_are_refused_or_warned_of() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    with pytest.raises(sw.PlanError, match="weight differs between ranks 0 and 1"):
        sw.fully_shard(copy.deepcopy(model), granularity="dim")
    with pytest.warns(UserWarning, match="Each rank keeps its part"):
        sw.fully_shard(model, granularity="dim", on_different_values="warn")
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.to_local(), weight.chunk(2)[dist.get_rank()])


@on_ranks(2)
def test_a_placement_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        sw.PlanError, match=r"shard_placement_fn: weight \(4, 4\): expected None or"
    ):
        sw.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: Shard(2))


@on_ranks(4)
def test_two_levels_of_shards_are_refused() -> None:
    with pytest.raises(sw.PlanError, match=r"granularity 'dim' with .*hfsdp"):
        sw.fully_shard(nn.Linear(4, 4), granularity="dim", **options_of("hfsdp"))


@on_ranks(2)
def test_it_gives_no_warning_of_padding() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.fully_shard(nn.Linear(4, 4097), granularity="dim")


@on_ranks(2)
def test_a_buffer_of_parameters_without_elements() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3), requires_grad=False))
    sw.fully_shard(model, granularity="dim")
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model[0].parameters())
