"""Activation checkpointing does not change gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.train.model import GPT, Block, Shape
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_close, own_part

KINDS = ("full", "reentrant", "selective")
SHAPE = Shape(vocabulary=11, context=6, width=8, layers=4, heads=2)
BLOCK_PRODUCTS = 4


@on_ranks(2)
@pytest.mark.parametrize("shards_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, shards_first: bool) -> None:
    reference, model = _build(0), _build(0 if shards_first else 2, kind)
    sw.fully_shard(model, units=Block)
    model.checkpoint_every, model.checkpoint = 2, kind
    tokens = torch.randint(SHAPE.vocabulary, (4, SHAPE.context))
    for _ in range(2):
        _loss(reference, tokens).backward()
        _loss(model, own_part(tokens)).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name)


@pytest.mark.parametrize(("kind", "recomputed"), [("full", 3), ("reentrant", 3), ("selective", 0)])
def test_recomputed_products(kind: str, recomputed: int) -> None:
    """The result of the last product of a block is not needed in backward."""
    plain, checkpointed = (_count_products(_build(every, kind)) for every in (0, 1))
    least, most = recomputed * SHAPE.layers, BLOCK_PRODUCTS * SHAPE.layers
    assert least <= checkpointed - plain <= (most if recomputed else 0)


def _build(every: int, kind: str = "full") -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE).double()
    model.checkpoint_every, model.checkpoint = every, kind
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
