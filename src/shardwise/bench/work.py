"""The model, data, loss and optimizer, which are the same for all engines."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.bench.options import Setting
from shardwise.train.model import GPT, Block

__all__ = [
    "LEARNING_RATE",
    "NUM_TINY_UNITS",
    "TrainedModel",
    "Work",
    "fused_adamw",
    "gpt_work",
    "next_token_loss",
    "tiny_work",
]

NUM_TINY_UNITS = 200
TINY_WIDTH = 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Work:
    """A model to train, the same on every rank, with different batches."""

    build: Callable[[], nn.Module]
    block: type[nn.Module]  # class of the modules to wrap, besides the root
    draw: Callable[[torch.Generator], Tensor]  # returns a batch
    loss: Callable[[nn.Module, Tensor], Tensor]
    bf16: bool

    def batch(self, turn: int, rank: int) -> Tensor:
        """Return the batch of a turn, which is the same for every engine."""
        return self.draw(torch.Generator().manual_seed(turn * 1000 + rank))

    def make(self) -> nn.Module:
        """Build the model, with the same values each time."""
        torch.manual_seed(0)
        return self.build()


class TrainedModel:
    """A model that one engine trains."""

    def __init__(
        self,
        work: Work,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = fused_adamw(model.parameters()) if optimizer is None else optimizer
        self._work = work
        self._autocast = autocast

    def step(self, batch: Tensor) -> Tensor:
        """Run forward, backward and update; return the detached loss of this rank's batch."""
        with self.around():
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            return self._work.loss(self.model, batch)

    def around(self) -> AbstractContextManager[None]:
        """Return a context manager to run each step in."""
        return nullcontext()


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def gpt_work(setting: Setting) -> Work:
    """Return next-token prediction on random tokens with the GPT of `shardwise train`."""
    shape = setting.shape
    size = (setting.batch, shape.context + 1)

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(0, shape.vocab, size, generator=generator)

    return Work(lambda: GPT(shape), Block, draw, next_token_loss, setting.is_bf16)


def tiny_work(setting: Setting) -> Work:
    """Return a model of `NUM_TINY_UNITS` units with very little to compute or send."""

    def build() -> nn.Module:
        return nn.Sequential(*(_Tiny() for _ in range(NUM_TINY_UNITS)))

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randn(1, TINY_WIDTH, generator=generator)

    return Work(build, _Tiny, draw, _mean_square, setting.is_bf16)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(TINY_WIDTH, TINY_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss
