"""`torch.compile` around and inside units: graph breaks, and gradients computed in slots."""

import copy
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.fsdp import FullyShardedDataParallel
from shardwise.runtime.gradients import Gradients
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_close,
    assert_equal_models,
    full,
    own_part,
    sharded_pair,
)

THOROUGH = pytest.mark.thorough
WIDTH = 256  # large enough for weights to use slots
VOCABULARY = 300
BACKENDS = ["aot_eager", "inductor"]
WAYS = ("once", "checkpoint", "twice", "penalty")  # the last two use a weight twice


class Block(nn.Module):
    """Uses its weights in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        else:
            y = self.inner(x)
        return y

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(self.norm(x)).relu())
        if self.way == "twice":
            y = self.second(y)
        if self.way == "penalty":
            y = y + self.second.weight.square().mean()
        return y


class Model(nn.Module):
    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for way in ways)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def build(kind: type[Model], *ways: str) -> tuple[nn.Module, nn.Module]:
    """A model whose blocks are units, and the same model in one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference, model = sharded_pair(kind(ways).double(), units=Block)
    return model, reference


def weights_in_slots(model: nn.Module, reference: nn.Module) -> set[str]:
    """The weights with gradients in their slots. Compares all gradients with one process."""
    found: defaultdict[str, set[bool]] = defaultdict(set)
    write = Gradients.write

    def watch(gradients: Gradients, position: int, gradient: Tensor) -> None:
        slot = gradients._buffer.views[position]
        name = gradients.parameters[position].name
        found[name].add(gradient.data_ptr() == slot.data_ptr())
        write(gradients, position, gradient)

    for step in range(2):
        tokens = torch.randint(0, VOCABULARY, (4, 5))
        with mock.patch.object(Gradients, "write", watch):
            model(own_part(tokens)).square().mean().backward()
        reference(tokens).square().mean().backward()
        assert_equal_models(model, reference, step)
    assert all(len(ways) == 1 for ways in found.values()), "the same in each step"
    return {name for name, is_in_slot in found.items() if is_in_slot == {True}}


@on_ranks(2)
@pytest.mark.parametrize(
    ("ways", "backend"),
    [
        (("once", "checkpoint"), "aot_eager"),
        *(pytest.param(WAYS, name, marks=THOROUGH) for name in BACKENDS),
    ],
)
def test_compiled_blocks_compute_in_slots(ways: tuple[str, ...], backend: str) -> None:
    """If a graph uses a weight several times, the compiler adds the gradients, in any memory."""
    model, reference = build(Model, *ways)
    eager = weights_in_slots(model, reference)
    layers = {f"blocks.{i}.{name}.weight" for i in range(len(ways)) for name in ("first", "second")}
    assert eager == {"embedding.weight", *layers} - {"blocks.3.second.weight"}
    model, reference = build(Model, *ways)
    for block in model.get_submodule("blocks").children():
        block.compile(fullgraph=True, backend=backend)
    added = {"blocks.2.second.weight", "blocks.3.second.weight"}
    assert weights_in_slots(model, reference) - added == eager - added


class Unrolled(Model):
    """Computes between its units, without a loop: Dynamo compiles no loop with a graph break."""

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        x = self.blocks[0](x).tanh()
        y: Tensor = self.head(self.blocks[1](x))
        return y


@THOROUGH
@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_breaks_only_at_its_units(backend: str) -> None:
    """A weight that is used in two graphs loses its slot: neither can add to the other's."""
    model, reference = build(Unrolled, "once", "once")
    eager = weights_in_slots(model, reference)
    model, reference = build(Unrolled, "once", "once")
    counters.clear()
    counting = CompileCounterWithBackend(backend)
    model.forward = torch.compile(model.forward, backend=counting)
    assert weights_in_slots(model, reference) == eager - {"embedding.weight"}
    assert counting.frame_count == 4, "the embedding, both blocks, between them, and the head"
    breaks = counters["graph_break"]
    assert sum(breaks.values()) == 2
    assert all("UnitMethods.__call__" in reason for reason in breaks)


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_units_inside_compiled_modules(granularity: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model[0], backend="eager")
    model[0] = compiled
    sw.fully_shard(model, units=nn.Linear, granularity=granularity)
    x = torch.randn(4, 6).double()
    for one, rows in ((model, own_part(x)), (reference, x)):
        one(rows).square().mean().backward()
    for parameter, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(full(parameter.grad), plain.grad, "gradient")
    with pytest.raises(sw.PlanError, match="'_orig_mod' is; pass that module"):
        sw.ledger(compiled)


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", pytest.param("dim", marks=THOROUGH)])
def test_a_compiled_step_with_its_backward(granularity: Any) -> None:
    """On a CPU, backward runs on the thread that compiles, which must not find the engine."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model = sw.fully_shard(copy.deepcopy(reference), units=nn.Linear, granularity=granularity)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss: Any = model(x).square().mean()
        loss.backward()
        detached: Tensor = loss.detach()
        return detached

    counting = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=counting)
    for number in range(3):
        x = torch.randn(4, 6).double()
        compiled(own_part(x))
        reference.zero_grad()
        reference(x).square().mean().backward()
        assert_equal_models(model, reference, number)
        if number == 1:
            num_frames = counting.frame_count
    assert counting.frame_count == num_frames > 0


@on_ranks(1, thorough=(2,))  # the first use in a rank takes seconds
def test_compiled_autograd_is_refused() -> None:
    """It drops what is queued for the end of backward, so no gradient would be reduced."""
    torch._dynamo.reset()
    reference, model = sharded_pair(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double())
    x = torch.randn(4, 6).double()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(sw.StepError, match="compiled autograd"),
    ):
        model(own_part(x)).square().mean().backward()
    model(own_part(x)).square().mean().backward()
    reference(x).square().mean().backward()
    assert_equal_models(model, reference, 0)


@THOROUGH
@on_ranks(2)
def test_a_compiled_optimizer_step() -> None:
    torch.manual_seed(0)
    reference = nn.Linear(5, 3).double()
    model = sw.fully_shard(copy.deepcopy(reference), granularity="dim")
    FullyShardedDataParallel(nn.Linear(2, 2))  # its hook runs in all steps of optimizers
    for one in (model, reference):  # a compiled Adam rounds its corrections to float32
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(2):
            optimizer.zero_grad()
            one(torch.ones(2, 5).double()).square().mean().backward()
            step()
    assert_equal_models(model, reference, 1)


@on_ranks(1)
def test_compiled_steps_of_runs_are_refused() -> None:
    model = sw.fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(Exception, match=r"optimizer\.step needs granularity"):
        torch.compile(optimizer.step, backend="eager")()
