"""Small models that are hard to shard, for `shardwise verify`.

The command also verifies the trainer's GPT.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.forecast.adapters import Adapters
from shardwise.forecast.models.adapted import adapt
from shardwise.plan.policies import Units

__all__ = ["MODELS", "VOCABULARY", "Subject", "next_token_loss", "random_tokens"]

ROWS = 24  # rows of a global batch; divide evenly over 1, 2, 3, 4, 6, 8, 12 and 24 ranks
VOCABULARY = 48
WIDTH = 16


class Subject(NamedTuple):
    """The first arguments of `verify`, in its order."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    units: Units = "auto"


class LanguageModel(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] tokens to [batch, time, vocabulary] logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


# -- a mixture of experts ------------------------------------------------------------------------


class MixtureOfExperts(LanguageModel):
    """A router picks experts per token, so ranks with different tokens use different parameters."""

    def __init__(self) -> None:
        super().__init__(ExpertBlock(num_experts=8, per_token=2) for _ in range(2))


class ExpertBlock(nn.Module):
    """A router and its experts, added to their input (top-k gating: arXiv 1701.06538)."""

    def __init__(self, num_experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)  # [tokens, width]
        scores, chosen = self.router(tokens).topk(self.per_token)  # [tokens, per_token] each
        shares = scores.softmax(dim=-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):  # an expert without tokens on this rank does not run
                output = expert(tokens[rows]) * shares[rows, places, None]
                mixed = mixed.index_add(0, rows, output)
        return x + mixed.view_as(x)


def _topics(step: int) -> Tensor:
    """Return tokens [rows, time]; each quarter of the rows uses different tokens and experts."""
    topics = torch.arange(ROWS)[:, None] // (ROWS // 4) + 4 * step
    return (3 * topics + torch.randint(3, (ROWS, 5))) % VOCABULARY


# -- an encoder and a decoder --------------------------------------------------------------------


class EncoderDecoder(nn.Module):
    """A transformer with dropout, whose two embeddings and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.target = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH,
            nhead=2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=2 * WIDTH,
            dropout=0.1,
            batch_first=True,
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.target.weight = self.source.weight
        self.head.weight = self.source.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[batch, time] tokens each to [batch, time of target, vocabulary] logits."""
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        decoded = self.transformer(self.source(source), self.target(target), tgt_mask=future)
        logits: Tensor = self.head(decoded)
        return logits


def _sentences(_step: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (ROWS, 7)), torch.randint(VOCABULARY, (ROWS, 5))


# -- convolutions --------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Convolutions with batch norm, which normalizes over a rank's rows and updates buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.stages = nn.Sequential(ConvStage(stride=1), ConvStage(stride=2), ConvStage(stride=1))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] images to [batch, 10] logits."""
        features = self.stages(self.stem(images))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class ConvStage(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.convolution(x)))


def _images(_step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 6, 6), torch.randint(10, (ROWS,))


# -- adapters on a frozen base -------------------------------------------------------------------


class Adapted(LanguageModel):
    """A frozen model with trainable low-rank updates (LoRA: arXiv 2106.09685)."""

    def __init__(self) -> None:
        super().__init__(AdaptedBlock() for _ in range(3))
        adapt(self, Adapters(rank=3), base=torch.float32, trained=torch.float32)


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(functional.gelu(self.wide(self.norm(x))))
        return x + y


# -- batches and losses --------------------------------------------------------------------------


def random_tokens(_step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, 7))


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each token from those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _translation_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def _label_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


TRANSFORMER_LAYERS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}

MODELS: dict[str, Subject] = {
    "moe": Subject(MixtureOfExperts, _topics, next_token_loss, ExpertBlock),
    "encoder-decoder": Subject(EncoderDecoder, _sentences, _translation_loss, TRANSFORMER_LAYERS),
    "conv": Subject(ConvNet, _images, _label_loss, ConvStage),
    "lora": Subject(Adapted, random_tokens, next_token_loss, AdaptedBlock),
}
