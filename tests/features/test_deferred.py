"""A model on the meta device that is sharded before it has storage, as with FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import fsdp
from shardwise.errors import NotMaterialized
from tests.models import WIDTH, Stack
from tests.ranks import on_ranks


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
