"""Training beside plain PyTorch on the same device."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.plan.strategy import STRATEGIES
from shardwise.tensor.sharding import local_of
from tests.fuzz.optimizers import make_optimizer
from tests.gpu.registry import Context
from tests.runtime.one_process import BATCH, assert_close, assert_equal_parameters, mean_over_ranks
from tests.streams.models import CASES, build

__all__ = ["Pair", "WideStack", "adamw", "compare", "copies_beside", "is_reached"]

WIDE = 256  # weights of this width have their gradients computed in slots
Around = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class WideStack(nn.Sequential):
    """Wide enough for weight gradients in slots, and for products on tensor cores."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(*(WideBlock() for _ in range(depth)))


class WideBlock(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(self.norm(x)).relu())
        return y


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer("adamw, fused", list(model.parameters()))


def mesh_for(strategy: str, context: Context) -> DeviceMesh | None:
    """Return a mesh of two axes if the strategy needs one."""
    if STRATEGIES[strategy].num_axes == 1:
        return None
    shape = (2, context.num_ranks // 2) if context.num_ranks > 1 else (1, 1)
    names = ("replicate", "shard")
    if context.kind == "simulated":
        ranks = torch.arange(context.num_ranks).view(shape)
        return DeviceMesh("cuda", ranks, mesh_dim_names=names, _init_backend=False)
    return init_device_mesh(context.device.type, shape, mesh_dim_names=names)


class Pair:
    """A sharded model, and plain PyTorch on the same device with the whole batch.

    Args:
        context: of the check.
        name: of a model of the tests, or "wide stack".
        make: makes the optimizers.
        options: of `sw.fully_shard`.
    """

    def __init__(
        self,
        context: Context,
        name: str = "gpt",
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        self.context = context
        units: Any = WideBlock
        if name == "wide stack":
            self._draw: Callable[[], Tensor] = lambda: torch.randn(BATCH, WIDE).double()
            self._loss: Callable[[Any], Tensor] = lambda y: y.square().mean()
            torch.manual_seed(0)
            whole: nn.Module = WideStack().double()
        else:
            case, whole = CASES[name], build(name)
            units, self._loss = case.units, case.loss
            self._draw = lambda: case.batch(BATCH)
        self.reference = whole.to(context.device)
        self.model: Any = copy.deepcopy(self.reference)
        options = {"mesh": mesh_for(options.get("strategy", "fsdp"), context)} | options
        sw.fully_shard(self.model, **({"units": units} | options))
        self.optimizer, self.plain_optimizer = make(self.model), make(self.reference)
        self.step_number = 0

    def loss(self, batch: Tensor) -> Tensor:
        """The loss of this rank."""
        return self._loss(self.model(batch.chunk(self.context.num_ranks)[self.context.rank]))

    def batch(self) -> Tensor:
        torch.default_generator.manual_seed(1000 + self.step_number)
        return self._draw().to(self.context.device)

    def compute(self, around: Around | None = None, accumulate: int = 1) -> None:
        """Run forward and backward of both, and compare losses and gradients."""
        for part in range(accumulate):
            self.step_number += part > 0
            batch = self.batch()
            with around(self.model) if around is not None else contextlib.nullcontext():
                loss = self.loss(batch) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            plain = self._loss(self.reference(batch.clone())) / accumulate
            plain.backward()  # type: ignore[no-untyped-call]
            assert_close(mean_over_ranks(loss), plain, f"loss of step {self.step_number}")

    def step(
        self,
        around: Around | None = None,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        steps_in_backward: bool = False,
    ) -> None:
        """A step of both, compared."""
        self.compute(around, accumulate)
        if not steps_in_backward:
            self.compare()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.reference.parameters(), clip)
            found = sw.clip_grad_norm_(self.model.parameters(), clip)
            assert_close(found.to(norm.device), norm, "norm")
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        if not steps_in_backward:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.compare()
        self.step_number += 1

    def compare(self) -> None:
        """Compare parameters and gradients."""
        beside = copies_beside(self.reference, self.model)
        assert_equal_parameters(self.model, beside, self.step_number)


def copies_beside(reference: nn.Module, model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the parameters of ``reference`` on the devices of those of ``model``."""
    copies = {}
    for (name, own), (_, plain) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        device = (local_of(own) if isinstance(own, DTensor) else own).device
        copies[name] = nn.Parameter(plain.detach().to(device), plain.requires_grad)
        copies[name].grad = None if plain.grad is None else plain.grad.to(device)
    return copies


def compare(
    context: Context,
    name: str = "gpt",
    steps: int = 3,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    around: Around | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    in_backward: bool = False,
    **options: Any,
) -> Pair:
    """Train with plain PyTorch beside it; losses, gradients and parameters must be equal."""
    pair = Pair(context, name, make, **options)
    if in_backward:
        sw.optimizer_in_backward(pair.model, pair.optimizer)
    for _ in range(steps):
        pair.step(around, accumulate=accumulate, clip=clip, steps_in_backward=in_backward)
    return pair


@contextlib.contextmanager
def is_reached(error: type[BaseException], text: str = "") -> Iterator[None]:
    """Expect ``error``; as `pytest.raises`, which may not be installed."""
    raised: BaseException | None = None
    try:
        yield
    except error as caught:
        raised = caught
    assert raised is not None, f"{error.__name__} was not raised"
    assert text in str(raised), raised
