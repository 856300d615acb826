"""Programs that compute on several streams of their own."""

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.runtime.one_process import own_part
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Problem, Simulation

if TYPE_CHECKING:
    from tests.streams.clock import Event, Stream


class Enter(torch.autograd.Function):
    """Forward changes to another stream; backward changes back, as autograd does by itself.

    On CUDA, autograd runs a node on the stream of its forward, and makes the next node wait for the
    gradient that it passes on, but not for later nodes of the stream, such as AccumulateGrad.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: "Side") -> Tensor:
        ctx.side = side
        side.simulation.enter(side.stream)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        side: Side = ctx.side
        side.simulation.leave(side.stream)
        assert side.passed is not None
        side.simulation.current_stream(DEVICE).wait_event(side.passed)
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: "Side") -> Tensor:
        ctx.side = side
        side.simulation.leave(side.stream)
        side.simulation.current_stream(DEVICE).wait_stream(side.stream)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        side: Side = ctx.side
        side.stream.wait_stream(side.simulation.current_stream(DEVICE))
        side.simulation.enter(side.stream)
        return gradient, None


class Side:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.stream: Stream = simulation.new_stream(DEVICE)
        self.passed: Event | None = None  # the gradient of the layer's input is there

    def note(self, *_: object) -> None:
        self.passed = self.stream.record_event()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.side: Side | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            return torch.tanh(self.linear(x))
        y: Tensor = self.linear(x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(self.side.note)
        return torch.tanh(y)


class Net(nn.Module):
    """A chain of layers, the second of which computes on a stream of its own; or branches."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            assert isinstance(layer, Layer)
            side = layer.side
            if side is None:
                x = layer(x)
            elif self.branches:  # it needs the input of the model only
                x = x + _aside(layer, first, side)
            else:
                side.stream.wait_stream(side.simulation.current_stream(DEVICE))
                x = _aside(layer, x, side)
        return x


def _aside(layer: Layer, x: Tensor, side: Side) -> Tensor:
    entered = Enter.apply(x, side)  # type: ignore[no-untyped-call]
    left: Tensor = Leave.apply(layer(entered), side)  # type: ignore[no-untyped-call]
    return left


@on_ranks(2)
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"strategy": "zero2"}, {"strategy": "ddp"}, {"prefetch": 0}], ids=str
)
def test_units_on_several_streams_are_ordered(options: dict[str, Any], branches: bool) -> None:
    torch.manual_seed(0)
    reference, model = (Net(branches=branches).double() for _ in range(2))
    model.load_state_dict(reference.state_dict())
    simulation = Simulation()
    with simulated(simulation):
        simulation.current_device = DEVICE.index
        sw.fully_shard(model.to(DEVICE), units=Layer, **options)
        layers = [one for one in model.layers if isinstance(one, Layer)]
        for layer in layers[1:3] if branches else layers[1:2]:
            layer.side = Side(simulation)
        for _ in range(3):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            own = own_part(x).to(DEVICE).requires_grad_()
            for side in (layer.side for layer in layers):
                if side is not None:
                    side.stream.wait_stream(simulation.current_stream(DEVICE))
            torch.autograd.backward(model(own).sum())
        # On CUDA, autograd records the streams that use what it passes on.
        found = [
            str(one)
            for one in simulation.found
            if one.problem is not Problem.EARLY_FREE or "a pool" in one.text
        ]
    assert not found, "\n".join(found[:5])
