"""A model on the meta device that is sharded before it has storage, as with FSDP2."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import fsdp
from shardwise.errors import NotMaterialized
from tests.models import WIDTH, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_equal_models, assert_equal_steps


def test_a_forward_without_storage_names_the_parameters_of_the_first_unit() -> None:
    with torch.device("meta"):
        model = Stack()
    for block in model.layers:
        sw.fully_shard(block)
    sw.fully_shard(model)
    x = torch.randn(2, WIDTH)
    for unit, names in ((model, r"\['first.weight', 'first.bias'"), (model.layers[1], r"\['up\.")):
        with pytest.raises(NotMaterialized, match=rf"still on meta device: {names}"):
            unit(x)
    model.to_empty(device="cpu")
    model.load_state_dict(Stack().state_dict(), strict=False)
    assert model(x).isfinite().all()


@on_ranks(2)
@pytest.mark.parametrize("drop_in", [False, True])
def test_ignored_parameters_stay_ignored_when_they_get_storage(drop_in: bool) -> None:
    """Experts of each rank, say, once became one sharded parameter with parts of both."""
    shard = fsdp.fully_shard if drop_in else sw.fully_shard
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    ignored = {model[0].weight}
    shard(model[0], ignored_params=ignored)
    shard(model, ignored_params=ignored)
    model.to_empty(device="cpu")
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[0].bias, DTensor)
    with torch.no_grad():
        model[0].weight.fill_(dist.get_rank())
        for parameter in (model[0].bias, *model[1].parameters()):
            parameter.fill_(1.0)
    x = torch.full((2, WIDTH), 1.0 + dist.get_rank())
    model(x).sum().backward()
    gradient: Any = model[0].weight.grad
    assert torch.equal(gradient, WIDTH * x.sum(0).expand(WIDTH, -1))  # of this rank


def test_a_call_that_was_refused_ignores_nothing_later() -> None:
    model = Stack()
    ignored = set(model.first.parameters())
    with pytest.raises(sw.PlanError, match="no_such_strategy"):
        sw.fully_shard(model, strategy="no_such_strategy", ignored_params=ignored)
    with pytest.raises(sw.PlanError, match="is for a model on the meta device"):
        sw.fully_shard(model, init=sw.Initialization(seed=0), ignored_params=ignored)
    sw.fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def build_on(device: str) -> Stack:
    torch.manual_seed(0)
    with torch.device(device):
        return Stack().double()


@on_ranks(3)
@pytest.mark.parametrize("on_meta", [0, 1])
@pytest.mark.parametrize("first_use", ["forward", "gathered", "unshard", "save"])
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_a_model_may_have_values_on_some_ranks_only(
    granularity: Any, first_use: str, on_meta: int, tmp_path: Path
) -> None:
    """The engine takes over when all ranks use the model, not when some give it storage."""
    reference = build_on("cpu")
    model = build_on("meta" if dist.get_rank() == on_meta else "cpu")
    for module in (*model.layers, model):
        sw.fully_shard(module, granularity=granularity)
    if dist.get_rank() == on_meta:
        with pytest.raises(NotMaterialized, match="still on meta device"):
            model(torch.zeros(2, WIDTH))
        model.to_empty(device="cpu")
    else:
        model.to("cpu")
    whole = reference.state_dict()
    if granularity == "dim":
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(whole)
    match first_use:
        case "gathered":
            with sw.gathered(model):
                assert_equal_models(model, reference, 0)
        case "unshard":
            cast("sw.FSDPModule", model.layers[1]).unshard()
            assert_equal_models(model.layers[1], reference.layers[1], 0)
        case "save":
            sw.save(tmp_path / "saved", model=model)
            sw.load(tmp_path / "saved", model=model)
    torch.manual_seed(1)  # batches are drawn, and not all ranks have drawn values
    assert_equal_steps(model, reference, make_optimizer=adamw)


@on_ranks(2)
def test_units_of_a_model_that_has_values_on_some_ranks_only_are_refused() -> None:
    model = build_on(("cpu", "meta")[dist.get_rank()])
    with pytest.raises(sw.PlanError, match="same model, on the meta device or not"):
        sw.fully_shard(model, units="auto")
