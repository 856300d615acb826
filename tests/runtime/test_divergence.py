"""If ranks enter different units, every rank gets an error that names them, within seconds."""

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.models import WIDTH, Block
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import (
    assert_equal_steps,
    options_of,
    sharded_pair,
)

SECONDS = 45  # it takes 3 on an idle machine


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("fsdp", 2), ("zero2", 2), ("hsdp", 4)),
        *(
            pytest.param(*other, marks=pytest.mark.thorough)
            for other in (("fsdp", 4), ("zero2", 4), ("hsdp", 2))
        ),
    ],
)
def test_units_of_one_shape_are_told_apart(strategy: str, ranks: int) -> None:
    """FSDP2 gathers the different last layers of the ranks, and computes wrong results."""
    texts = run_on(ranks, _choose_by_rank, strategy)
    assert len(set(texts)) == 1, "the same words on every rank"
    for rank in range(ranks):
        assert re.search(rf"\n  {rank} +1 +", texts[0])
    *others, odd = map(str, range(ranks))
    parted = f"rank {', '.join(others)} entered experts.1; rank {odd} entered experts.2."
    assert f"They differ from call 3 of the step on: {parted}" in texts[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_ranks_that_freeze_different_parameters_are_told_apart(strategy: str) -> None:
    """Each would train a part of what the other has frozen, with half of its gradient."""
    reference, model = sharded_pair(Routed().double(), units=Block, strategy=strategy)
    _check_step(model, reference)
    for frozen in (model.experts[0], reference.experts[0]):  # on all ranks
        frozen.requires_grad_(False)
    _check_step(model, reference)
    model.experts[1].requires_grad_(dist.get_rank() == 1)
    with pytest.raises(sw.RanksDiverged, match=r"reduce experts\.1 without elements 0:") as caught:
        model(torch.randn(2, WIDTH).double(), [1, 0]).sum().backward()
    assert "requires_grad" in str(caught.value)
    model.experts[1].requires_grad_(True)
    _check_step(model, reference)


@on_ranks(3)
def test_a_rank_that_exits_in_forward_is_an_error_on_the_others() -> None:
    reference, model = sharded_pair(Routed().double(), units=Block)
    _check_step(model, reference)
    leaves = dist.get_rank() == 1
    hook = model.experts[1].register_forward_pre_hook(_leave) if leaves else None
    with pytest.raises(SystemExit if leaves else sw.PeerAborted) as caught:
        model(torch.randn(2, WIDTH).double(), [0, 1]).sum().backward()
    if hook is None:
        assert "rank 1 gave up in step 1, forward of experts.1: SystemExit: 3" in str(caught.value)
    else:
        hook.remove()
    _check_step(model, reference)


class Routed(nn.Module):
    """Sends its input through some of several blocks of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, experts: list[int]) -> Tensor:
        x = self.router(x)
        for expert in experts:
            x = self.experts[expert](x)
        return x


def _check_step(model: nn.Module, reference: nn.Module) -> None:
    def loss(one: Any, x: Tensor) -> Any:
        return one(x, [0, 1]).square().mean()

    assert_equal_steps(model, reference, 1, loss=loss, zeroes=True)


def _choose_by_rank(strategy: str) -> str:
    reference, model = sharded_pair(Routed().double(), units=Block, **options_of(strategy))
    _check_step(model, reference)
    x = torch.randn(2, WIDTH).double()
    own = [0, 2] if dist.get_rank() == dist.get_world_size() - 1 else [0, 1]
    started = time.monotonic()
    with pytest.raises(sw.RanksDiverged) as caught:
        model(x, own).sum().backward()
    assert time.monotonic() - started < SECONDS
    for _ in range(2):
        _check_step(model, reference)
    return str(caught.value)


def _leave(_module: nn.Module, _args: object) -> None:
    raise SystemExit(3)
