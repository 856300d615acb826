"""float16: every rank skips the same steps, and divisions lose nothing."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.fsdp import FullyShardedDataParallel, MixedPrecision
from shardwise.plan.strategy import PRESETS
from tests.covering import covered_first
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import assert_equal_models, full, options_of, rank, world_size

HALF = sw.MixedPrecisionPolicy(param_dtype=torch.float16)
BROKEN = (1, 4)  # steps
KINDS = ("loop", "foreach", "fused")


@on_ranks(2)
@pytest.mark.parametrize(("kind", "clips"), covered_first(product(KINDS, (False, True))))
def test_the_scaler_acts_as_in_one_process(kind: str, clips: bool) -> None:
    _train_scaled(kind, "fsdp", clips)


@on_ranks(4)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in ("ddp", "zero2", "hfsdp") else pytest.mark.thorough)
        for name in PRESETS
    ],
)
def test_the_scaler_acts_as_in_one_process_whatever_is_sharded(strategy: str) -> None:
    _train_scaled("fused", strategy, True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_float16_on_one_rank_skips_the_step_on_all(kind: str) -> None:
    scales = run_on(2, _overflow, kind)
    assert scales == [[2.0**15, 2.0**15]] * 2


@on_ranks(4)
def test_division_by_the_number_of_ranks_loses_no_small_gradients() -> None:
    """Before the sum, small gradients would underflow; without it, large sums would overflow.
    So a part of the division precedes the sum, and the rest follows it in the shards' dtype.
    """
    for value in (2.0**-23, 3 * 2.0**-23, 30000.0):
        model = nn.Linear(2, 1, bias=False)
        sw.fully_shard(model, mp_policy=HALF)
        x = torch.full((1, 2), value, dtype=torch.float16)
        for micro_batch in (1, 2):
            model(x).sum().backward()
            assert model.weight.grad is not None
            expected = x.float() * micro_batch
            assert torch.equal(full(model.weight.grad), expected), value


@on_ranks(4)
def test_gradients_that_are_added_are_divided_alike() -> None:
    """Each reentrant checkpoint runs a backward, so a weight gets a gradient from both."""
    layer = nn.Linear(2, 1, bias=False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            once = [checkpoint(self.layer, part, use_reentrant=True) for part in x.chunk(2)]
            return torch.cat(once)

    model = Twice()
    sw.fully_shard(model, mp_policy=HALF)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    model(x).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(full(layer.weight.grad), x.detach().sum(0, keepdim=True))


@on_ranks(4)
def test_a_communication_hook_gets_gradients_that_are_not_divided() -> None:
    model = FullyShardedDataParallel(
        nn.Linear(2, 1, bias=False), mixed_precision=MixedPrecision(param_dtype=torch.float16)
    )
    seen: list[Tensor] = []

    def hook(state: None, whole: Tensor, shard: Tensor) -> None:
        del state
        seen.append(whole[:2].clone())
        shard.zero_()

    model.register_comm_hook(None, hook)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert torch.equal(seen[0], seen[0].new_tensor([1.0, 2.0]))


def _train_scaled(kind: str, strategy: str, clips: bool) -> None:
    """Train in float64, with losses that are not finite on one rank in some steps."""
    reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=Block, **options_of(strategy))
    both = (reference, model)
    optimizers = [_adamw(one, kind) for one in both]
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in both]
    for step in range(6):
        parts = torch.randn(12, WIDTH).double().chunk(world_size())
        whole = [reference(part).square().mean() for part in parts]
        loss = model(parts[rank()]).square().mean()
        if step in BROKEN:
            whole[1] = whole[1] * float("inf")
            loss = loss * (float("inf") if rank() == 1 else 1.0)
        scalers[0].scale(torch.stack(whole).mean()).backward()  # type: ignore[no-untyped-call]
        scalers[1].scale(loss).backward()
        for one, optimizer, scaler in zip(both, optimizers, scalers, strict=True):
            if clips:
                scaler.unscale_(optimizer)
                sw.clip_grad_norm_(one.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_equal_models(model, reference, step)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        taken = [int(o.state_dict()["state"][0]["step"]) for o in optimizers]
        assert taken == [step + 1 - sum(step >= at for at in BROKEN)] * 2


def _adamw(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    flags: dict[str, Any] = {"foreach": kind == "foreach", "fused": kind == "fused"}
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **flags)


def _overflow(kind: str) -> list[float]:
    """Return the scales after a step that overflows only here, and after one that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    sw.fully_shard(model, units=Block, mp_policy=HALF)
    optimizer = _adamw(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    before = [full(p.detach()).clone() for p in model.parameters()]
    scales = []
    for overflows in (True, False):
        weight = 100.0 if overflows and rank() == 1 else 1e-3
        loss = model(torch.randn(4, WIDTH)).float().mean() * weight
        scaler.scale(loss).backward()
        grads = [p.grad for p in model.parameters()]
        assert all(bool(g.isfinite().all()) for g in grads if g is not None) == (not overflows)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = [full(p.detach()) for p in model.parameters()]
        same = [torch.equal(p, q) for p, q in zip(now, before, strict=True)]
        assert all(same) if overflows else not any(same)
        assert all(bool(p.isfinite().all()) for p in now)
        scales.append(float(scaler.get_scale()))
    return scales
