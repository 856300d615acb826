"""Activation checkpointing does not change gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.plan.policies import choose_units
from shardwise.train.config import MemoryConfig
from shardwise.train.model import GPT, Block, gpt_shape, prepare_blocks
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_close, own_part

KINDS = ("full", "reentrant", "products", "selective")
SHAPE = gpt_shape(vocabulary=11, context=6, width=8, layers=4, heads=2)
BLOCK_PRODUCTS = 4


@on_ranks(2)
@pytest.mark.parametrize("shards_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, shards_first: bool) -> None:
    reference, model = _build(0), _build(0)
    if shards_first:
        sw.fully_shard(model, units=Block)
    prepare_blocks(model, MemoryConfig(checkpoint_every=2, checkpoint=kind))  # type: ignore[arg-type]
    if not shards_first:
        sw.fully_shard(model, units=Block)
    tokens = torch.randint(SHAPE.vocab, (4, SHAPE.context))
    for _ in range(2):
        _loss(reference, tokens).backward()
        _loss(model, own_part(tokens)).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name)


@pytest.mark.parametrize(
    ("kind", "recomputed"), [("full", 3), ("reentrant", 3), ("selective", 1), ("products", 0)]
)
def test_recomputed_products(kind: str, recomputed: int) -> None:
    """The result of the last product of a block is not needed in backward."""
    plain, checkpointed = (_count_products(_build(every, kind)) for every in (0, 1))
    least, most = recomputed * SHAPE.layers, BLOCK_PRODUCTS * SHAPE.layers
    assert least <= checkpointed - plain <= (most if recomputed else 0)


def _build(every: int, kind: str = "full") -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE).double()
    prepare_blocks(model, MemoryConfig(checkpoint_every=every, checkpoint=kind))  # type: ignore[arg-type]
    return model


def _loss(model: nn.Module, tokens: torch.Tensor) -> Any:
    return model(tokens).square().mean()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _count_products(model: GPT) -> int:
    loss = _loss(model, torch.zeros(2, SHAPE.context, dtype=torch.long))
    with _Operators() as operators:
        loss.backward()
    return int(operators.seen["mm"])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_the_same_elements_again(kind: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).double()
    model = nn.Sequential(nn.ModuleList([block]))
    found = []
    for mode in ("none", kind):
        checkpoint_blocks(model, {"0.0": mode})
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
        block(x).square().sum().backward()
        found.append([p.grad.clone() for p in block.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_one_recomputed_block_of_several_is_still_a_unit() -> None:
    model = _build(0)
    checkpoint_blocks(model, {"blocks.1": "full"})
    assert choose_units(model, "auto")[1:] == [f"blocks.{n}" for n in range(SHAPE.layers)]
