"""Traps: the data of a rank determine which units it runs and which parameters it uses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.modules import Experts
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_equal_models,
    assert_equal_steps,
    own_part,
    rank,
    sharded_pair,
    step_all,
    world_size,
)


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "ddp"])
def test_experts_that_differ_by_rank_get_the_gradients_of_one_process(strategy: str) -> None:
    """FSDP2 silently sums gradients of different parameters: 1.5 instead of 0.5."""
    torch.manual_seed(0)
    layers = nn.Sequential(Block(), Experts(), Experts()).double()
    reference, model = sharded_pair(layers, units={Block, Experts}, strategy=strategy)
    used: list[set[str]] = []
    for number, layer in enumerate(model[1].experts):
        layer.register_forward_hook(lambda *_, name=str(number): used[-1].add(name))
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for _ in range(4):
        used.append(set())
        assert_equal_steps(model, reference, 1)
        step_all(optimizers)
    everywhere: list[Any] = [None] * world_size()
    dist.all_gather_object(everywhere, used)
    assert any(other != used for other in everywhere), "the ranks used the same: a weak test"


@on_ranks(2)
def test_a_unit_with_one_unused_parameter_is_reduced() -> None:
    """Megatron-FSDP v2 counts gradients, so it waits for the missing one and never reduces."""
    reference, model = sharded_pair(nn.Sequential(Pair(), Pair(), Pair()).double(), units=Pair)
    assert_equal_steps(model, reference)
    kinds = sw.ledger(model).names()
    assert [kinds.count(f"reduce {unit}") for unit in range(3)] == [1, 1, 1]
    assert model[0].unused.grad is None


@on_ranks(2)
def test_a_unit_that_one_rank_does_not_reach_in_backward_is_reduced() -> None:
    """A hook on gradients never runs on a rank that has none."""
    reference, model = sharded_pair(Cuttable().double(), units=Block)
    cuts = [(False, True), (True, False), (False, False)]
    for step, cut in enumerate(cuts):
        batch = torch.randn(BATCH, WIDTH).double()
        model(own_part(batch), cut=cut[rank()]).square().mean().backward()
        for part, is_cut in zip(batch.chunk(2), cut, strict=True):
            (reference(part, cut=is_cut).square().mean() / 2).backward()
        assert_equal_models(model, reference, step)


@on_ranks(3)
def test_only_one_rank_may_have_gradients_at_all() -> None:
    """The loss does not depend on the data of one rank, whose gradients are all zero."""
    reference, model = sharded_pair(nn.Sequential(Block(), Block()).double(), units=Block)
    batch = torch.randn(BATCH, WIDTH).double()
    weight = 1.0 if rank() == 1 else 0.0
    (model(own_part(batch)).square().mean() * weight).backward()
    (reference(batch.chunk(3)[1]).square().mean() / 3).backward()
    assert_equal_models(model, reference, 0)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.used(x))
        return y


class Cuttable(nn.Module):
    """Runs all of its blocks, and may detach the output of the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, *, cut: bool) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x)
            if cut and position == 1:
                x = x.detach()
        return x
