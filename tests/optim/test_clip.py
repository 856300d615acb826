"""Clipping by the global norm gives the same results on every rank as in one process."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm.communicator import communicator
from tests.models import CASES, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import (
    assert_close,
    assert_equal_models,
    options_of,
    own_part,
    runtime_of,
    sharded_pair,
)

ORDERS = (1.0, 2.0, 3.0, 0.5, math.inf, -math.inf, 0.0)
CLIPS: tuple[Callable[..., Any], ...] = (
    sw.clip_grad_norm_,
    nn.utils.clip_grad_norm_,
    partial(nn.utils.clip_grad_norm_, foreach=True),
)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "fsdp"),
        (4, "hsdp"),
        *(
            pytest.param(4, strategy, marks=pytest.mark.thorough)
            for strategy in ("fsdp", "ddp", "hfsdp")
        ),
    ],
)
def test_every_norm_is_that_of_one_process(ranks: int, strategy: str) -> None:
    by_rank = run_on(ranks, _clip, strategy)
    assert by_rank == [by_rank[0]] * ranks, "the same float on every rank"
    assert len({*by_rank[0]}) > len(ORDERS), "all norms are equal: a weak test"


def _clip(strategy: str) -> list[float]:
    """Norms before clipping."""
    found = []
    for name in ("stack", "tiny"):  # some ranks hold nothing of "tiny"
        reference, model = sharded_pair(name, **options_of(strategy))
        runtime = runtime_of(model)
        reduce = communicator(runtime.mesh.world, runtime.pools.device).reduce
        batch = CASES[name].batch(12)
        # Torch refuses an infinite norm of a gradient without elements, which "tiny" has.
        orders = [order for order in ORDERS if name == "stack" or math.isfinite(order)]
        for order in orders:
            for clip in CLIPS if order in (2.0, math.inf) else CLIPS[::2]:
                for one, part in ((model, own_part(batch)), (reference, batch)):
                    one.zero_grad()
                    CASES[name].loss(one(part)).backward()  # type: ignore[no-untyped-call]
                expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, order)
                before = reduce.sent[0]
                norm = clip(model.parameters(), 0.01, order)
                num_exchanges = 0 if strategy == "ddp" else 1  # for all units
                assert reduce.sent[0] - before == num_exchanges
                assert_close(norm, expected, f"norm {order}")
                assert_equal_models(model, reference, 0)
                found.append(norm.item())
    assert torch.isfinite(torch.tensor(found)).all()
    return found


@on_ranks(2)
@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float64")])
def test_norms_are_exact_if_the_first_gradient_has_a_smaller_dtype(dtypes: Any) -> None:
    first, second = (getattr(torch, dtype) for dtype in dtypes)
    model = nn.Sequential(nn.Linear(8, 8, dtype=first), nn.Linear(8, 8, dtype=second))
    policy = sw.MixedPrecisionPolicy(master_dtype="keep")
    sw.fully_shard(model, units=nn.Linear, granularity="dim", mp_policy=policy)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradient: Any = model[1].weight.grad
    expected = 8e5 / 3  # infinite in float16
    gradient.fill_(expected / 8)
    norm = sw.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(expected, rel=4 * torch.finfo(second).eps)
    assert gradient.full_tensor().norm().item() == pytest.approx(1.0, rel=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_a_rank_that_clips_is_notified_of_an_exception(granularity: Any) -> None:
    case = CASES["stack"]
    model = build("stack")
    sw.fully_shard(model, units=case.units, granularity=granularity)
    first = next(model.parameters())  # its gradient is the last

    def backward() -> None:
        case.loss(model(own_part(case.batch(4)))).backward()  # type: ignore[no-untyped-call]

    def step() -> torch.Tensor:
        backward()
        return sw.clip_grad_norm_(model.parameters(), 0.1)

    def fail(_parameter: torch.Tensor) -> None:
        raise ValueError("it hurts")

    backward()
    if dist.get_rank() == 0:
        handle = first.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError, match="it hurts"):
            backward()
        handle.remove()
    else:
        with pytest.raises(sw.PeerAborted, match="it hurts"):
            step()
    model.zero_grad()
    assert step() > 0
