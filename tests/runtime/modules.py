"""Modules that fail on demand or choose what they use, for tests of several features."""

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import WIDTH, Block


def raise_together(error: BaseException, ranks: dist.ProcessGroup | None) -> NoReturn:
    """Raise ``error`` when all ``ranks`` have come. One that is late would raise `PeerAborted`."""
    if ranks is not None:
        dist.barrier(ranks)
    raise error


class FailingLinear(nn.Module):
    """Raises in the place that is set, on all ranks of the group that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.where = ""
        self.ranks: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise_together(ValueError("it hurts"), self.ranks)
        y: Tensor = self.linear(x)
        if self.where == "backward":
            y.register_hook(self._raise)  # type: ignore[no-untyped-call]
        return y

    def _raise(self, _gradient: Tensor) -> None:
        raise_together(ValueError("it hurts"), self.ranks)


class Experts(nn.Module):
    """A mixture of experts in one unit; each row of the batch goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.gate = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        chosen = scores.argmax(1)
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():  # experts without rows are not called
            rows = (chosen == number).nonzero()[:, 0]
            weight = scores[rows, number][:, None]
            y = y.index_add(0, rows, self.experts[number](x[rows]) * weight)
        return y


class Choosing(nn.Module):
    """Uses one of several matrices, and a block."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(num_experts))
        self.last = Block()

    def forward(self, x: Tensor, experts: list[int]) -> Tensor:
        for expert in experts:
            x = torch.tanh(x @ self.experts[expert])
        y: Tensor = self.last(x)
        return y
