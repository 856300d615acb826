"""A loss in chunks that multiplies by ``lm_head.weight``, inside of ``forward`` and outside."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_steps

WORDS, CHUNK = 11, 3


class Language(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(hidden @ weight.t(), targets, reduction="sum")


def chunked_loss(model: Any, hidden: Tensor, words: Tensor, *, recomputed: bool) -> Tensor:
    total = hidden.new_zeros(())
    pairs = zip(
        torch.split(hidden.flatten(0, 1), CHUNK), torch.split(words.flatten(), CHUNK), strict=True
    )
    for chunk, targets in pairs:
        arguments = chunk, model.lm_head.weight, targets
        if recomputed:
            total = total + checkpoint(head_loss, *arguments, use_reentrant=False)
        else:
            total = total + head_loss(*arguments)
    return total / words.numel()


def patch(model: nn.Module, *, recomputed: bool) -> None:
    """Replace ``forward`` of the instance, as TRL's trainers do."""
    hidden_of = model.forward

    def forward(self: nn.Module, words: Tensor) -> Tensor:
        return chunked_loss(self, hidden_of(words), words, recomputed=recomputed)

    model.forward = MethodType(forward, model)


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_in_forward_it_is_right(granularity: Any, *, tied: bool, recomputed: bool) -> None:
    reference, model = Language(tied=tied).double(), Language(tied=tied).double()
    model.load_state_dict(reference.state_dict())
    for one in (reference, model):
        patch(one, recomputed=recomputed)
    sw.fully_shard(model, units=Block, granularity=granularity)
    words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))
    assert_equal_steps(model, reference, 2, loss=lambda m, x: m(x), batch=lambda: words)


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_outside_of_forward_an_error_says_what_to_do(*, tied: bool) -> None:
    model = sw.fully_shard(Language(tied=tied), units=Block)
    words = torch.randint(WORDS, (4, 6))
    hidden = model(words)
    name = "embedding" if tied else "lm_head"
    expected = rf"{name}.weight .*such as lm_head.weight, compute the loss in the model's forward"
    with pytest.raises(sw.errors.ShardedTensorError, match=expected):
        chunked_loss(model, hidden, words, recomputed=False)
    with pytest.raises(sw.errors.ShardedTensorError, match=expected):
        model.lm_head(hidden)
