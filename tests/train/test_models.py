"""The GPT: shapes, causality, positions, the tied head and the first weights."""

import math

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise.train.build import build_model
from shardwise.train.config import Config
from shardwise.train.loop import shard
from shardwise.train.models import GPT, Shape, rotary_table, rotate

SHAPE = Shape(vocabulary=50, context=12, width=32, layers=3, heads=4)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def tokens(batch: int = 2, time: int = 12) -> torch.Tensor:
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("time", [1, 5, 12])
def test_logits_for_each_position(model: GPT, time: int) -> None:
    assert model(tokens(3, time)).shape == (3, time, 50)


def test_a_later_token_changes_nothing_before_it(model: GPT) -> None:
    changed = tokens()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens()), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_the_order_of_earlier_tokens_matters(model: GPT) -> None:
    """Without positions, attention with one block could not tell these apart."""
    swapped = tokens()
    swapped[:, [2, 5]] = swapped[:, [5, 2]]
    assert not torch.allclose(model(tokens())[:, 11], model(swapped)[:, 11], atol=1e-4)


def test_attention_sees_distances_not_positions() -> None:
    table = rotary_table(SHAPE)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))

    def score(query_at: int, key_at: int) -> float:
        return float(rotate(q, table[:, query_at]) @ rotate(k, table[:, key_at]))

    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_the_head_is_the_embedding(model: GPT) -> None:
    assert model.head.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names
    assert "head.weight" not in names


def test_the_first_loss_is_that_of_a_guess(model: GPT) -> None:
    logits = model(tokens(8))
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens(8)[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(50), rel=0.05)


def test_layers_that_add_to_the_stream_start_smaller(model: GPT) -> None:
    deviation = 0.02 / math.sqrt(2 * SHAPE.layers)
    deviations = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    for index in range(SHAPE.layers):
        block = f"blocks.{index}"
        assert deviations[f"{block}.attention.out.weight"] == pytest.approx(deviation, rel=0.1)
        assert deviations[f"{block}.mlp.2.weight"] == pytest.approx(deviation, rel=0.1)
        assert deviations[f"{block}.attention.qkv.weight"] == pytest.approx(0.02, rel=0.1)


def test_every_parameter_gets_a_gradient(model: GPT) -> None:
    model(tokens()).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_seed_is_a_set_of_weights() -> None:
    config = Config.model_validate({"model": {"layers": 2, "width": 32}})
    other = Config.model_validate({"model": {"layers": 2, "width": 32}, "train": {"seed": 1}})
    first, again, different = (values(c) for c in (config, config, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], different["embedding.weight"])
    assert torch.equal(first["rotations"], rotary_table(build_model(config).shape))


def values(config: Config) -> dict[str, torch.Tensor]:
    model = build_model(config)
    shard(model, config.on(1))
    with sw.gathered(model):
        tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    return tensors | dict(model.named_buffers())
