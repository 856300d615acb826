"""Models whose parameters outweigh their activations, for tests that count bytes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.plan.policies import Units


class Tower(nn.Module):
    """Units of given widths on a narrow stream, so that activations weigh nothing."""

    def __init__(self, widths: tuple[int, ...], head: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16))
            for width in widths
        )
        self.head = nn.Linear(16, head) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


class Tied(nn.Module):
    """A tower between an embedding and a head that have one weight, large enough for its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 16)
        self.tower = Tower((150, 150, 150))
        self.head = nn.Linear(16, 5000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.tower(self.embedding(x[:, 0].long())))
        return y


class TwoHeads(nn.Module):
    """Two weights of the root, neither of which is worth to open the memory of both for."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower((150, 150, 150))
        self.heads = nn.ModuleList(nn.Linear(16, size, bias=False) for size in (5000, 4500))

    def forward(self, x: Tensor) -> Tensor:
        y = self.tower(x)
        return torch.cat([head(y) for head in self.heads], 1)


@dataclass(frozen=True)
class Shape:
    build: Callable[[], nn.Module]
    units: Units = "auto"


SHAPES = {
    "even": Shape(lambda: Tower((160,) * 5)),
    "uneven": Shape(lambda: Tower((150, 101, 203, 128, 165, 75, 250, 256))),
    "large root": Shape(lambda: Tower((150, 150, 150), head=1500)),
    "tied": Shape(Tied, units=nn.Sequential),
    "wide": Shape(lambda: Tower((850,) * 3)),  # more than a window from each rank
    "two heads": Shape(TwoHeads, units=nn.Sequential),
    "one unit": Shape(lambda: Tower((150, 150)), units=None),
}
