"""Activations in host memory: the same gradients, and no copy of a parameter."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm.device import KINDS, Device
from tests.covering import covered_first
from tests.models import CASES, WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_models,
    own_part,
    runtime_of,
    sharded_pair,
)

OFFLOADED = ("checkpointed inside, reentrant", "gpt", "checkpointed inside", "unused and reused")
ROWS = 240  # enough for activations to exceed the minimum size


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "way", "strategy"),
    covered_first(product(OFFLOADED, range(3), ("fsdp", "zero2", "ddp"))),
)
def test_gradients_are_those_of_one_process(name: str, way: int, strategy: str) -> None:
    case, offload = CASES[name], OFFLOADS[way]
    reference, model = sharded_pair(name, strategy=strategy, prefetch=2)
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    for step in range(2):
        batches = [case.batch(ROWS) for _ in "ab"]
        with offload(model):  # several forwards before their backward
            losses = [case.loss(model(own_part(batch))) for batch in batches]
        sum(losses).backward()  # type: ignore[union-attr]
        sum(case.loss(reference(batch)) for batch in batches).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        assert_equal_models(model, reference, step)
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(2)
def test_activations_are_copied_and_parameters_are_not() -> None:
    model = sw.fully_shard(nn.Sequential(*(Wide() for _ in range(2))).double(), units=Wide)
    buffers = {
        flat.codec.buffer.flat.untyped_storage()._cdata
        for unit in runtime_of(model).units
        for flat in unit.flats
    }
    x = torch.randn(ROWS, WIDTH).double()

    def copied(offload: Offload) -> tuple[int, int]:
        """The bytes of parameters, and of other tensors, that a forward copies on this thread."""
        with Copies() as copies, offload(model):
            loss = model(x).sum()
        _backward(loss)
        copied_bytes = {True: 0, False: 0}
        for storage, num_bytes in copies.sources.items():
            copied_bytes[storage in buffers] += num_bytes
        return copied_bytes[True], copied_bytes[False]

    assert copied(lambda _model: nullcontext()) == (0, 0)
    assert copied(OFFLOADS[2])[0] >= 2 * WIDTH * 100 * 8, "a weak test"
    of_parameters, of_others = copied(sw.offload_activations)
    assert of_parameters == 0
    # From each unit: its input, and the output of tanh, saved by tanh and by the matrix product.
    assert of_others == 2 * (WIDTH + 2 * 100) * ROWS * 8


@on_ranks(1)
def test_in_place_changes_are_detected() -> None:
    model = sw.fully_shard(nn.Sequential(Block()).double())
    small = torch.randn(4, WIDTH).double().requires_grad_()
    with sw.offload_activations(model):
        y = torch.tanh(model(small))  # too small to be moved
        y.add_(1)
    with pytest.raises(sw.StepError, match=r"shape \(4, 6\).*changed in place"):
        _backward(y)
    slopes = []
    for change in (0, 1):  # the copy does not contain this change
        large = torch.ones(ROWS, WIDTH).double().requires_grad_()
        with sw.offload_activations(model):
            z = torch.tanh(model(large))
            z.add_(change)
        _backward(z)
        slopes.append(large.grad)
    assert_close(slopes[1], slopes[0], "slope")


def test_copies_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor that backward needs next is copied while backward uses another one."""
    monkeypatch.setitem(KINDS, "cpu", Logged)
    model = sw.fully_shard(nn.Sequential(Block()).double())
    with sw.offload_activations(model):
        y = torch.ones(ROWS, WIDTH).double().requires_grad_()
        for _ in range(4):
            y = y.exp()  # saves its output
        assert _num_waits() == 2, "memory of the last two cannot be used again yet"
    assert _num_waits() == 4
    Logged.log.clear()
    _backward(y)
    events = [event[:2] for event in Logged.log]
    to_device = max(stream for _, stream in events)
    copies = [i for i, event in enumerate(events) if event == ("record", to_device)]
    waits = [i for i, event in enumerate(events) if event == ("wait", 0)]
    assert len(copies) == 4, "their ends"
    assert len(waits) == 4
    assert copies[1] < waits[0], "the second is on its way before the first is used"


def test_it_needs_a_sharded_model() -> None:
    with pytest.raises(sw.PlanError, match="Block is not sharded"), sw.offload_activations(Block()):
        pass


Offload = Callable[[nn.Module], AbstractContextManager[Any]]
OFFLOADS: list[Offload] = [
    sw.offload_activations,
    lambda _model: save_on_cpu(),
    # What `save_on_cpu` does on a GPU; on a CPU it copies nothing.
    lambda _model: saved_tensors_hooks(lambda x: torch.empty_like(x).copy_(x), lambda x: x),
]


def _num_waits() -> int:
    """How often the stream that computes waited."""
    return sum(event[:2] == ("wait", 0) for event in Logged.log)


class Logged(Device):
    """A device whose streams are numbers, the current one 0."""

    is_accelerator = True
    log: ClassVar[list[tuple[str, int, Any]]] = []
    numbers = itertools.count(1)

    def new_stream(self) -> int:
        return next(self.numbers)

    def current_stream(self) -> int:
        return 0

    def record(self, stream: int) -> float:
        self.log.append(("record", stream, None))
        return float(len(self.log))

    def wait(self, stream: int, event: Any) -> None:
        self.log.append(("wait", stream, event))


class Copies(TorchDispatchMode):
    """Records which storages this thread copies, and how many bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            source: Tensor = args[1]
            key = source.untyped_storage()._cdata
            self.sources[key] = self.sources.get(key, 0) + source.numel() * source.element_size()
        return func(*args, **(kwargs or {}))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 100)
        self.down = nn.Linear(100, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def _backward(output: Tensor) -> None:
    output.sum().backward()  # type: ignore[no-untyped-call]
