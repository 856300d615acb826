"""Models for programs on the simulated device, in addition to those of `tests/models.py`."""

from typing import Any

import torch
from torch import Tensor, nn

from tests import models
from tests.models import Block, Case, Stack

__all__ = ["CASES", "build"]

_WIDE = 64


class Alternating(nn.Module):
    """Calls other blocks in every second step, so some prefetched units are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        first, *others, last = self.layers
        x = first(x)
        for layer in others[self.turn :: 2]:
            x = layer(x)
        self.turn = 1 - self.turn
        y: Tensor = last(x)
        return y


class Wide(nn.Module):
    """Has activations that are worth offloading."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(_WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES = models.CASES | {
    "small": Case(lambda: Stack(depth=2), Block),
    "alternating": Case(Alternating, Block),
    "wide": Case(Wide, Block, batch=lambda size: torch.randn(size, _WIDE, dtype=torch.float64)),
}


def build(name: str, seed: int = 0) -> Any:
    """Build a model by name, as `tests.models.build` does."""
    if name in models.CASES:
        return models.build(name, seed)
    torch.default_generator.manual_seed(seed)
    return CASES[name].build().double()
