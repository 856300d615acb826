"""Small float64 models for programs that run with both implementations."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
STEPS = 2


class Block(nn.Module):
    """A residual block, checkpointed or not."""

    def __init__(self, checkpointed: str = "no") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed == "no":
            return self._run(x)
        y: Tensor = checkpoint(self._run, x, use_reentrant=self.checkpointed == "reentrant")
        return y

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Chunk(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Net(nn.Module):
    """Blocks between two linear layers, with a buffer and a method besides forward."""

    scale: Tensor

    def __init__(self, checkpointed: str = "no", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(checkpointed) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.5]))
        if tied:
            self.head.weight = nn.Parameter(self.embed.weight.detach().T.contiguous())
            self.again = nn.Linear(4, WIDTH)
            self.again.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        if hasattr(self, "again"):
            y = y + self.again(x * 0.5)
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.head(y) * self.scale
        return out

    def twice(self, x: Tensor) -> Tensor:
        y: Tensor = self(x) + self(x * 0.5)
        return y


def make_net(seed: int = 0, **options: object) -> Net:
    """A model with the same parameters on every rank."""
    torch.manual_seed(seed)
    return Net(**options).double()  # type: ignore[arg-type]


def batch(step: int, rank: int, size: int = 5) -> Tensor:
    """A batch of ``rank``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64)
