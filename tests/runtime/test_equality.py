"""C2: every model trains as in one process on the global batch, to 1e-10 in float64."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covered_first, pairwise
from tests.models import CASES, LIKE_OTHERS, WIDTH, Block, Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_close,
    assert_equal_models,
    assert_equal_training,
    own_part,
    step_all,
)

COMBINED = ("stack", "gpt", "unused and reused", "tied", "lora")


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in CASES),
        *covered_first(product(CASES, (3, 1, 4)), leave=LIKE_OTHERS),
    ],
)
def test_training_equals_one_process(name: str) -> None:
    assert_equal_training(name, steps=3)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "prefetch", "reshard", "accumulate", "set_to_none", "clip"),
    pairwise(COMBINED, (1, 0, 2, 9), (None, True, False), (1, 2, 3), (True, False), (None, 0.01)),
)
def test_options_change_no_number(
    name: str,
    prefetch: int,
    reshard: bool | None,
    accumulate: int,
    set_to_none: bool,
    clip: float | None,
) -> None:
    assert_equal_training(
        name,
        prefetch=prefetch,
        reshard_after_forward=reshard,
        accumulate=accumulate,
        set_to_none=set_to_none,
        clip=clip,
    )


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "adagrad", "loop"])
def test_any_optimizer_works_on_shards(kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        match kind:
            case "sgd":
                return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
            case "adagrad":
                # A large eps, as in `adamw`: some gradients are rounding alone, which differs by
                # processor, and Adagrad divides by their size.
                return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-3)
            case _:
                foreach, fused = kind == "foreach", kind == "fused"
                return torch.optim.AdamW(
                    parameters, lr=1e-2, eps=1e-3, foreach=foreach, fused=fused
                )

    for name in ("stack", "tiny", "recurrent"):
        assert_equal_training(name, make_optimizer=make)


@on_ranks(2)
@pytest.mark.parametrize(
    "seeds", [range(1, 9), pytest.param(range(9, 26), marks=pytest.mark.thorough)], ids=str
)
def test_random_models_and_options(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        reference = RandomTree(seed).double()
        model = RandomTree(seed).double()
        model.load_state_dict(reference.state_dict())
        units: Any = draw.choice([Block, RandomTree, {Block, RandomTree}, 50, "auto", None])
        if units == "auto" and not any(len(list(m.inner)) > 1 for m in _trees(model)):
            units = None
        prefetch, reshard = draw.randint(0, 3), draw.choice([None, True, False])
        sw.fully_shard(model, units=units, prefetch=prefetch, reshard_after_forward=reshard)
        optimizers = [adamw(m.parameters()) for m in (reference, model)]
        for step in range(3):
            batch = torch.randn(BATCH, WIDTH).double()
            reference(batch).square().mean().backward()
            model(own_part(batch)).square().mean().backward()
            assert_equal_models(model, reference, step)
            step_all(optimizers)


@on_ranks(2)
@pytest.mark.parametrize(
    ("units", "reshard", "order"),
    covered_first(
        (*row, order)
        for row, order in product(
            ((Block, None), (Block, True), (Block, False), (None, None)), ([0, 1], [1, 0])
        )
    ),
)
def test_two_forwards_before_two_backwards(
    units: Any, reshard: bool | None, order: list[int]
) -> None:
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=units, reshard_after_forward=reshard)
    for step in range(3):
        batches = [torch.randn(BATCH, WIDTH).double() for _ in order]
        losses = [model(own_part(batch)).square().mean() for batch in batches]
        for position in order:
            losses[position].backward()
        sum(reference(batch).square().mean() for batch in batches).backward()
        assert_equal_models(model, reference, step)
        both = sum(model(own_part(batch)).sin().mean() for batch in batches)
        both.backward()
        sum(reference(batch).sin().mean() for batch in batches).backward()
        assert_equal_models(model, reference, step)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(3)
def test_ranks_may_use_different_parameters() -> None:
    reference, model = Branching(), Branching()
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units=Block)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        choices = [step, None, 0]
        for part, expert in zip(batch.chunk(3), choices, strict=True):
            (reference(part, expert).square().mean() / 3).backward()
        expert = choices[torch.distributed.get_rank()]
        model(own_part(batch), expert).square().mean().backward()
        assert_equal_models(model, reference, step)
        assert model.experts[3].grad is None
        step_all(optimizers)


@on_ranks(2)
def test_ranks_may_go_around_what_a_unit_holds() -> None:
    reference, model = SkippingFirst().double(), SkippingFirst().double()
    model.load_state_dict(reference.state_dict())
    for unit in (model.first, model.last):
        sw.fully_shard(unit)
    sw.fully_shard(model)
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        choices = [step == 1, True]
        for part, skips in zip(batch.chunk(2), choices, strict=True):
            (reference(part, skips).square().mean() / 2).backward()
        model(own_part(batch), choices[torch.distributed.get_rank()]).square().mean().backward()
        assert_equal_models(model, reference, step)


@on_ranks(2)
def test_zeros_for_unused_parameters_when_asked() -> None:
    model = build("unused and reused")
    sw.fully_shard(model, units=Block, unused="zeros")
    model(torch.randn(4, WIDTH).double()).sum().backward()
    for name, parameter in model.named_parameters():
        called = name.startswith(("shared", "other"))
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()) == called, name


@on_ranks(2)
def test_forward_without_gradients_and_between() -> None:
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=Block)
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        with torch.no_grad():
            assert_close(model(batch), reference(batch), "evaluation before")
        model(own_part(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        with torch.inference_mode():
            assert_close(model(batch), reference(batch), "evaluation with gradients about")
        assert_equal_models(model, reference, step)
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(0.9)
        kept_graph = model(batch)  # a graph without a backward
        assert_close(kept_graph.detach(), reference(batch).detach(), "after an update")
    assert isinstance(model, Stack)


class RandomTree(nn.Module):
    """Random nesting, order, repetition and skipping of layers, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.inner = nn.ModuleList(
            RandomTree(seed * 7 + i) if draw.random() < 0.4 and seed < 400 else Block()
            for i in range(draw.randint(1, 3))
        )
        self.gain = nn.Parameter(torch.rand(draw.randint(1, WIDTH)).double() + 0.5)
        self.order = [draw.randrange(len(self.inner)) for _ in range(draw.randint(1, 4))]
        for parameter in self.parameters():
            parameter.requires_grad = draw.random() < 0.8
        self.gain.requires_grad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position in self.order:
            x = torch.tanh(self.inner[position](x))
        return x * self.gain.sum()


def _trees(model: nn.Module) -> list[RandomTree]:
    return [module for module in model.modules() if isinstance(module, RandomTree)]


class Branching(nn.Module):
    """The data of a rank determine which matrices of the unit it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH).double() for _ in range(4))
        self.last = Block().double()

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        if expert is not None:
            x = x @ self.experts[expert]
        y: torch.Tensor = self.last(x)
        return y


class Skipping(nn.Module):
    """Computes, or returns its input, as it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        y: torch.Tensor = x if skips else self.block(x)
        return y


class SkippingFirst(nn.Module):
    """The output of its first unit needs gradients only on ranks that do not skip it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Skipping()
        self.last = Block()

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x, skips))
        return y
