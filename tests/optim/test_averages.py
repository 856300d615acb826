"""torch's own averages of weights, on shards."""

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_close, own_part, sharded_pair


@on_ranks(2)
@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_averages_are_those_of_one_process(kind: str, strategy: str) -> None:
    reference, model = sharded_pair("stack", strategy=strategy)
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}  # type: ignore[no-untyped-call]
    averages = [AveragedModel(one, **options) for one in (reference, model)]
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    for _ in range(3):
        batch = torch.randn(12, WIDTH).double()
        reference(batch).square().mean().backward()
        model(own_part(batch)).square().mean().backward()
        for average, one, optimizer in zip(averages, (reference, model), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(one)
    expected, average = averages
    for (name, p), q in zip(average.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(p, sw.ShardedTensor)
        assert_close(p.detach(), q.detach(), name)
    with torch.no_grad():
        assert_close(average(batch), expected(batch), "what the average computes")
