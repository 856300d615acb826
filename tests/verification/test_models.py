"""The built-in models have the properties that make them hard to shard."""

import pytest
import torch

from shardwise.cli.run_verify import BUILT_IN
from shardwise.verification.models import MODELS
from tests.covering import leaving


@pytest.mark.parametrize("ranks", leaving([4], [2, 4]))
def test_ranks_use_different_experts(ranks: int) -> None:
    subject = MODELS["moe"]
    torch.manual_seed(0)
    model = subject.model_fn()
    assert subject.loss_fn is not None
    used = []
    for rows in subject.batch_fn(0).chunk(ranks):
        model.zero_grad()
        subject.loss_fn(model, rows).backward()  # type: ignore[no-untyped-call]
        used.append({name for name, p in model.named_parameters() if p.grad is not None})
    assert used[0] - used[-1]
    assert used[-1] - used[0]


def test_an_embedding_is_tied_three_times() -> None:
    names = [name for name, _ in MODELS["encoder-decoder"].model_fn().named_parameters()]
    assert "source.weight" in names
    assert "target.weight" not in names
    assert "head.weight" not in names


def test_the_conv_net_has_buffers_that_change() -> None:
    subject = MODELS["conv"]
    model = subject.model_fn()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(subject.batch_fn(0)[0])
    assert any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_adapters_alone_are_trained() -> None:
    model = MODELS["lora"].model_fn()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 12
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in trained)


def test_every_batch_divides_into_the_usual_numbers_of_ranks() -> None:
    for subject in BUILT_IN.values():
        batch = subject.batch_fn(0)
        num_rows = len(batch[0] if isinstance(batch, tuple) else batch)
        assert all(num_rows % ranks == 0 for ranks in (1, 2, 3, 4, 6, 8))
