"""torch's optimizers that need whole parameters work, or are refused with an alternative."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import CASES, build
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_models, own_part


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = CASES["stack"].loss(model(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS"])
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_optimizers_of_torch(name: str, granularity: Any) -> None:
    kind = getattr(torch.optim, name)
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=CASES["stack"].units, granularity=granularity)
    optimizers = []
    for one in (reference, model):
        for parameter in one.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
        optimizers.append(kind([p for p in one.parameters() if p.requires_grad], lr=1e-2))
    batch = CASES["stack"].batch(12)
    if granularity == "dim" and name != "Adafactor":
        for one, optimizer, part in zip(
            (reference, model), optimizers, (batch, own_part(batch)), strict=True
        ):
            with pytest.MonkeyPatch.context() as patch:  # torch's Muon casts to bfloat16
                patch.setattr(Tensor, "bfloat16", lambda self: self.clone())
                _step(one, optimizer, part)
                _step(one, optimizer, part)
        assert_equal_models(model, reference, 2)
        return
    ways_out = {"Muon": "shardwise.optim.Muon", "Adafactor": "Adam8bit", "LBFGS": '"dim"'}
    with pytest.raises(sw.PlanError, match=rf"torch.optim.{name} needs whole.*{ways_out[name]}"):
        _step(model, optimizers[1], own_part(batch))
