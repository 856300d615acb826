"""Text from a model whose next byte is known."""

import torch
from torch import Tensor, nn

from shardwise.train.config import SampleConfig
from shardwise.train.sample import generate


class Successor(nn.Module):
    """Thinks that byte n + 1 follows byte n, and that ``n + 2`` may."""

    def __init__(self, *, doubt: float = 0.0) -> None:
        super().__init__()
        self.doubt = doubt
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.lengths.append(tokens.shape[1])
        logits = torch.full((*tokens.shape, 256), -1000.0)
        logits.scatter_(-1, (tokens + 1).remainder(256)[..., None], 0.0)
        logits.scatter_(-1, (tokens + 2).remainder(256)[..., None], self.doubt or -1000.0)
        return logits


def write(model: nn.Module, config: SampleConfig, *, context: int = 8, seed: int = 0) -> str:
    return generate(model, config, context=context, seed=seed, device=torch.device("cpu"))


def test_the_prompt_and_then_the_likeliest_bytes() -> None:
    assert write(Successor(), SampleConfig(prompt="ab", bytes=5)) == "abcdefg"


def test_no_more_than_the_context_is_seen() -> None:
    model = Successor()
    write(model, SampleConfig(prompt="abc", bytes=4), context=5)
    assert model.lengths == [3, 4, 5, 5]


def test_the_best_alone_leaves_no_doubt() -> None:
    model = Successor(doubt=-0.5)
    texts = {write(model, SampleConfig(prompt="a", bytes=10), seed=seed) for seed in range(5)}
    greedy = SampleConfig(prompt="a", bytes=10, top_k=1)
    assert len(texts) > 1
    assert {write(model, greedy, seed=seed) for seed in range(5)} == {"abcdefghijk"}


def test_a_low_temperature_leaves_no_doubt() -> None:
    config = SampleConfig(prompt="a", bytes=10, temperature=0.01)
    model = Successor(doubt=-0.5)
    assert {write(model, config, seed=seed) for seed in range(5)} == {"abcdefghijk"}


def test_a_seed_is_a_text() -> None:
    model = Successor(doubt=-0.5)
    config = SampleConfig(prompt="a", bytes=10)
    assert write(model, config, seed=3) == write(model, config, seed=3)


def test_nothing_written_can_steer_a_terminal() -> None:
    text = write(Successor(), SampleConfig(prompt="\x19", bytes=3))
    assert text == "\ufffd" * 4  # 0x19, 0x1a, escape, 0x1c


def test_it_leaves_the_model_training() -> None:
    model = Successor()
    write(model, SampleConfig(prompt="a", bytes=1))
    assert model.training
