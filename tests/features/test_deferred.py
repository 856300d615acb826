"""A model on the meta device that is sharded before it has storage, as with FSDP2."""

import pytest
import torch

import shardwise as sw
from shardwise.errors import NotMaterialized
from tests.models import WIDTH, Stack


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
