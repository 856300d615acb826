"""The GPT: shapes, causality, positions, the tied head, initialization and sampling."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.train.build import shard_model
from shardwise.train.config import Config, SampleConfig
from shardwise.train.model import GPT, gpt_shape, rotary_table, rotate
from shardwise.train.source import Gpt
from shardwise.train.summary import generate
from shardwise.train.tokenizer import Bytes

SHAPE = gpt_shape(vocabulary=50, context=12, width=32, layers=3, heads=4)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def tokens(batch: int = 2, time: int = 12) -> torch.Tensor:
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(1))


def test_packed_documents_are_as_if_alone(model: GPT) -> None:
    parts = torch.split(tokens(1, 12), [3, 1, 8], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    alone = torch.cat([model(part) for part in parts], dim=1)
    assert torch.allclose(model(tokens(1, 12), positions), alone, atol=1e-6)


@pytest.mark.parametrize("time", [1, 5, 12])
def test_logits_for_each_position(model: GPT, time: int) -> None:
    assert model(tokens(3, time)).shape == (3, time, 50)


def test_attention_is_causal(model: GPT) -> None:
    changed = tokens()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens()), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_the_order_of_earlier_tokens_matters(model: GPT) -> None:
    """Without positions a single block would not distinguish these."""
    swapped = tokens()
    swapped[:, [2, 5]] = swapped[:, [5, 2]]
    assert not torch.allclose(model(tokens())[:, 11], model(swapped)[:, 11], atol=1e-4)


def test_attention_depends_on_distances_not_positions() -> None:
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


def test_the_initial_loss_is_that_of_a_uniform_guess(model: GPT) -> None:
    logits = model(tokens(8))
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens(8)[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(50), rel=0.05)


def test_residual_layers_have_smaller_initial_weights(model: GPT) -> None:
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


def test_a_seed_determines_the_weights() -> None:
    config = Config.model_validate({"model": {"layers": 2, "width": 32}})
    other = Config.model_validate({"model": {"layers": 2, "width": 32}, "train": {"seed": 1}})
    first, again, different = (values(c) for c in (config, config, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], different["embedding.weight"])
    assert torch.equal(first["rotations"], rotary_table(Gpt(config).build().shape))


def values(config: Config) -> dict[str, torch.Tensor]:
    source = Gpt(config.with_ranks(1))
    model = source.build()
    shard_model(model, source)
    with sw.gathered(model):
        tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    return tensors | dict(model.named_buffers())


class Successor(nn.Module):
    """Predicts byte n + 1 after byte n, and with ``doubt`` also n + 2."""

    def __init__(self, *, doubt: float = 0.0) -> None:
        super().__init__()
        self.doubt = doubt
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, _positions: None) -> Tensor:
        self.lengths.append(tokens.shape[1])
        logits = torch.full((*tokens.shape, 256), -1000.0)
        logits.scatter_(-1, (tokens + 1).remainder(256)[..., None], 0.0)
        logits.scatter_(-1, (tokens + 2).remainder(256)[..., None], self.doubt or -1000.0)
        return logits


def write(model: nn.Module, config: SampleConfig, *, context: int = 8, seed: int = 0) -> str:
    run = {"model": {"context": context}, "train": {"seed": seed}}
    source = Gpt(Config.model_validate({**run, "sample": config.model_dump()}))
    return generate(model, source, Bytes(), torch.device("cpu"))


def test_the_prompt_is_followed_by_generated_bytes() -> None:
    assert write(Successor(), SampleConfig(prompt="ab", bytes=5)) == "abcdefg"


def test_the_window_is_the_context() -> None:
    model = Successor()
    write(model, SampleConfig(prompt="abc", bytes=4), context=5)
    assert model.lengths == [3, 4, 5, 5]


def test_top_1_is_greedy() -> None:
    model = Successor(doubt=-0.5)
    texts = {write(model, SampleConfig(prompt="a", bytes=10), seed=seed) for seed in range(5)}
    greedy = SampleConfig(prompt="a", bytes=10, top_k=1)
    assert len(texts) > 1
    assert {write(model, greedy, seed=seed) for seed in range(5)} == {"abcdefghijk"}


def test_a_low_temperature_is_greedy() -> None:
    config = SampleConfig(prompt="a", bytes=10, temperature=0.01)
    model = Successor(doubt=-0.5)
    assert {write(model, config, seed=seed) for seed in range(5)} == {"abcdefghijk"}


def test_a_seed_determines_the_text() -> None:
    model = Successor(doubt=-0.5)
    config = SampleConfig(prompt="a", bytes=10)
    assert write(model, config, seed=3) == write(model, config, seed=3)


def test_control_characters_are_replaced() -> None:
    text = write(Successor(), SampleConfig(prompt="\x19", bytes=3))
    assert text == "\ufffd" * 4  # 0x19, 0x1a, escape, 0x1c


def test_the_model_is_in_training_mode_afterwards() -> None:
    model = Successor()
    write(model, SampleConfig(prompt="a", bytes=1))
    assert model.training
