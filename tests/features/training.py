"""A small training whose steps can fail at chosen places, and fingerprints of its state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import WIDTH, Block
from tests.runtime.modules import FailingLinear, raise_together
from tests.runtime.one_process import options_of, rank, world_size

SECONDS = 45  # until every rank has the error


class Net(nn.Module):
    """Has everything that a forward changes: batch statistics, and the generator by dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(Block(), FailingLinear(), Block())
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.dropout(self.norm(self.first(x))))
        return y


class Tripping(torch.optim.Optimizer):
    """Raises after updating half of its parameters, if ``trips`` is set."""

    trips = False
    ranks: dist.ProcessGroup | None = None  # that raise
    num_steps = 0  # complete ones; torch calls the hooks of a step that calls another step twice

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.trips:
            super().step(closure)
            self.num_steps += 1
            return
        (group,) = self.param_groups
        parameters = group["params"]
        group["params"] = parameters[: len(parameters) // 2]
        super().step(closure)
        group["params"] = parameters
        raise_together(ValueError("it hurts"), self.ranks)


class TrippingAdamW(Tripping, torch.optim.AdamW):
    pass


class TrippingSGD(Tripping, torch.optim.SGD):
    """Also keeps the number of its steps in a state of no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        states: dict[Any, Any] = self.state
        states.setdefault("k", torch.tensor([0])).add_(1)
        super().step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], Tripping]] = {
    "adamw": lambda model: TrippingAdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: TrippingSGD(model.parameters(), lr=1e-2, momentum=0.9),
}


class Training:
    """A model and its optimizer, and the places at which their steps can fail."""

    def __init__(self, strategy: str = "fsdp", optimizer: str = "adamw", **options: Any) -> None:
        torch.manual_seed(7)
        net = Net()
        options |= options_of(strategy) if world_size() > 1 else {}
        self.model = sw.fully_shard(net, units={Block, FailingLinear}, **options)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.failing: Any = net.blocks[1]
        self.ranks: dist.ProcessGroup | None = None
        torch.manual_seed(100 + rank())

    def step(self, place: str = "", ranks: dist.ProcessGroup | None = None) -> None:
        """One step, which fails at ``place``, on all ``ranks`` if there are several."""
        self.failing.where = place
        self.optimizer.trips = place == "middle of step"
        self.ranks = self.failing.ranks = self.optimizer.ranks = ranks
        hook = self.optimizer.register_step_pre_hook(lambda *_: self._trip(place, "before step"))
        try:
            with sw.transaction(self.model, self.optimizer):
                self.body(place)
        finally:
            hook.remove()

    def body(self, place: str) -> None:
        self._trip(place, "data")
        batch = torch.randn(5, WIDTH)  # from the generator, whose state is restored
        self.model(batch).square().mean().backward()
        self._trip(place, "after backward")
        if place == "interrupt":
            raise_together(KeyboardInterrupt(), self.ranks)
        sw.clip_grad_norm_((self._trip(place, "clip", p) for p in self.model.parameters()), 0.1)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.step()
        self._trip(place, "after step")
        self.optimizer.zero_grad()

    def _trip(self, place: str, here: str, value: Any = None) -> Any:
        if place == here:
            raise_together(ValueError("it hurts"), self.ranks)
        return value

    def fingerprint(self) -> list[bytes]:
        """The bits of everything that a step changes."""
        (group,) = self.optimizer.param_groups
        states = pytree.tree_leaves(list(self.optimizer.state.values()))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*self.model.parameters(), *self.model.buffers(), *gradients, *states]
        texts = [str(group["lr"]), str(len(gradients)), str(len(states))]
        return [
            *(_bits(x) for x in (*tensors, torch.get_rng_state())),
            *(text.encode() for text in texts),
        ]


def _bits(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
    return local.detach().numpy().tobytes()
