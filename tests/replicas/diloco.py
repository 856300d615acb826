"""DiLoCo in one process: the reference of `sw.Outer`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Stack

__all__ = ["Simulation", "batch_of", "train"]


def batch_of(replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(replica, step)).square().mean().backward()
        optimizer.step()


class Simulation:
    """DiLoCo in one process, with whole parameters."""

    def __init__(
        self, outer: sw.Outer, lr: float, make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        torch.manual_seed(3)
        self.outer = outer
        self.replicas = [Stack().double() for _ in range(2)]
        self.replicas[1].load_state_dict(self.replicas[0].state_dict())
        self.inner = [torch.optim.AdamW(m.parameters(), lr=lr) for m in self.replicas]
        self.shared = [nn.Parameter(p.detach().clone()) for p in self.replicas[0].parameters()]
        self.optimizers = [make([p]) for p in self.shared]
        self.sent: dict[int, list[Tensor]] = {}

    def run(self, steps: range, members: list[list[int]]) -> None:
        for step in steps:
            for replica, (model, optimizer) in enumerate(
                zip(self.replicas, self.inner, strict=True)
            ):
                train(model, optimizer, replica, range(step, step + 1))
            if self.outer.delay:
                self.apply(step + 1, members)
            for fragment in self.outer.sent_after(step + 1):
                self.send(members[fragment])
            if not self.outer.delay:
                self.apply(step + 1, members)

    def send(self, members: list[int]) -> None:
        lists = [list(model.parameters()) for model in self.replicas]
        for index in members:
            self.sent[index] = [(self.shared[index] - p[index]).detach() for p in lists]

    @torch.no_grad()
    def apply(self, step: int, members: list[list[int]]) -> None:
        for fragment in self.outer.applied_after(step):
            for index in members[fragment]:
                shared = self.shared[index]
                shared.grad = torch.stack(self.sent[index]).mean(0)
                self.optimizers[index].step()
                for model in self.replicas:
                    list(model.parameters())[index].lerp_(shared, 1 - self.outer.mixing)
