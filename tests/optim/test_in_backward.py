"""An optimizer that steps in backward trains like one that steps after it."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.forecast.time.replay import schedule
from shardwise.plan.offload import NO_OFFLOAD
from shardwise.schedule.events import EventKind
from tests.covering import covered_first, leaving
from tests.models import CASES, LIKE_OTHERS, WIDTH, Block, Stack, build
from tests.ranks import on_ranks, run_on
from tests.runtime.modules import Choosing
from tests.runtime.one_process import (
    adamw,
    assert_close,
    full,
    mean_over_ranks,
    options_of,
    own_part,
    rank,
    runtime_of,
    sharded_pair,
    step_all,
    world_size,
)

PRESETS = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp")
MakeOptimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, foreach=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
}


@on_ranks(2)
@pytest.mark.parametrize("name", leaving(LIKE_OTHERS, CASES))
def test_every_model_trains_as_in_one_process(name: str) -> None:
    _train("fsdp", ["adamw"], [name])


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=() if name == "hfsdp" else pytest.mark.thorough) for name in PRESETS],
)
def test_every_strategy_and_optimizer(strategy: str) -> None:
    names = ["gpt", "unused and reused", "checkpointed inside, reentrant"]
    run_on(4, _train, strategy, ["fused"], names)
    if strategy in PRESETS[:4]:
        run_on(2, _train, strategy, ["foreach", "momentum"], ["gpt", "tied"])


@pytest.mark.parametrize(
    "policy",
    [
        sw.CPUOffloadPolicy(),
        sw.CPUOffloadPolicy(parameters=False),
        sw.CPUOffloadPolicy(step="device"),
    ],
)
def test_shards_on_the_host_are_stepped(policy: sw.CPUOffloadPolicy) -> None:
    run_on(2, _train, "fsdp", ["fused"], ["gpt", "tied", "unused and reused"], policy)


@on_ranks(2)
def test_few_gradients_are_alive_at_once() -> None:
    model = sw.fully_shard(nn.Sequential(*(Block() for _ in range(8))).double(), units=Block)
    plan = runtime_of(model).plan
    optimizer = adamw(model.parameters())
    alive = []  # units with gradients, whenever the optimizer steps
    optimizer.register_step_pre_hook(
        lambda *_: alive.append(sum(p.grad is not None for p in model.parameters()))
    )
    handle = sw.optimizer_in_backward(model, optimizer)
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    events = sw.ledger(model).events()
    assert events == schedule(plan, steps_in_backward=True)
    held, held_bytes = 0, []
    for event in events:
        is_new = event.kind is EventKind.FINISH_REDUCE
        held += (is_new - (event.kind is EventKind.STEP)) * event.bytes
        held_bytes.append(held)
    assert max(held_bytes) == sum(unit.gradient_shard_bytes for unit in plan.units) // 8
    assert held == 0
    assert runtime_of(model).pools.gathered.allocated_bytes == 0
    assert runtime_of(model).pools.gradients.held_bytes == 0
    assert runtime_of(model).pools.enclosing_gradients.held_bytes == 0
    assert alive == [4] * 16  # those of one block
    steps = [plan.units[e.unit].label for e in events if e.kind is EventKind.STEP]
    assert steps == [*"76543210"]
    handle.remove()
    for _ in range(2):
        model(torch.randn(4, WIDTH).double()).sum().backward()
    assert sw.ledger(model).events() == schedule(plan)
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero1", marks=pytest.mark.thorough)])
def test_every_unit_is_stepped_once_after_its_last_use(strategy: str) -> None:
    def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        return sharded_pair(make().double(), units=Block, strategy=strategy)

    def recompute(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x.requires_grad_()).square().mean()
        return loss

    def call_twice(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() + model(x.tanh()).sin().mean()
        return loss

    def throw_away(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return recompute(model, x)

    def go_around(model: Any, x: Tensor) -> Tensor:
        """The root does not see the calls of the first block, which backward recomputes."""
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(model.layers[0], x, use_reentrant=True)
        return x.square().mean()

    def take_slopes(model: nn.Module, x: Tensor) -> Tensor:
        loss = recompute(model, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        return loss

    train(*pair(Reuser), recompute)
    train(*pair(Reuser), throw_away)
    for forward in (call_twice, throw_away, go_around, take_slopes):
        train(*pair(Stack), forward)


def test_parameters_that_no_rank_used_are_not_stepped() -> None:
    run_on(2, _choose, "none", "fsdp")
    run_on(4, _choose, "none", "hsdp")


@on_ranks(2)
def test_unused_parameters_are_stepped_with_zeros() -> None:
    _choose("zeros", "fsdp")


@on_ranks(2)
def test_units_that_did_not_run_are_stepped_once() -> None:
    reference, model = sharded_pair(Turns().double(), units=Block, unused="zeros")

    def forward(one: nn.Module, x: Tensor) -> Tensor:
        if one is reference:
            for p in reference.parameters():
                p.grad = torch.zeros_like(p)
        loss: Tensor = one(x).square().mean()
        return loss

    train(reference, model, forward)


@on_ranks(2)
def test_unused_parameters_are_named_in_the_error() -> None:
    model = sw.fully_shard(Choosing().double(), units=Block, unused="error")
    sw.optimizer_in_backward(model, adamw(model.parameters()))
    before = {name: full(p.detach()) for name, p in model.named_parameters()}
    x = torch.randn(4, WIDTH).double()
    torch.autograd.grad(model(x.requires_grad_(), [0]).sum(), x)  # uses no parameters at all
    for name, p in model.named_parameters():
        assert_close(p.detach(), before[name], name)
    with pytest.raises(sw.StepError) as caught:
        model(x, _experts()[0]).sum().backward()
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == ["  experts.1: unused on every rank", "  experts.2: unused on rank 0"]
    model(x, [0, 1, 2]).sum().backward()
    model._modules["last"] = nn.Identity()  # a unit that does not run
    with pytest.raises(sw.StepError, match=r"last\.up\.weight: unused on every rank"):
        model(x, [0, 1, 2]).sum().backward()


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "method"),
    covered_first(
        product(("ddp", "fsdp", "hfsdp"), ("set_requires_gradient_sync", "set_requires_all_reduce"))
    ),
)
def test_gradients_may_wait_for_the_last_micro_batch(strategy: str, method: str) -> None:
    reference, model = sharded_pair("gpt", units="auto", **options_of(strategy))
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    sw.optimizer_in_backward(model, optimizers[1])
    for _ in range(2):
        for micro in range(3):
            batch = CASES["gpt"].batch(12)
            getattr(model, method)(micro == 2)
            (model(own_part(batch)) / 3).backward()
            (reference(batch) / 3).backward()
        step_all(optimizers)
        assert_same(model, reference, *optimizers)


@on_ranks(2)
def test_ignored_parameters_wait_for_the_step_after_backward() -> None:
    reference, model = Scaled().double(), Scaled().double()
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units=Block, ignored_params={model.scale})
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    sw.optimizer_in_backward(model, optimizers[1])
    x = torch.randn(4, WIDTH).double()  # the same on all ranks, as nobody averages the gradient
    for _ in range(2):
        before = model.scale.detach().clone()
        for one in (reference, model):
            one(x).square().mean().backward()
        assert torch.equal(model.scale.detach(), before)
        step_all(optimizers)
        assert_same(model, reference, *optimizers)


@on_ranks(2)
def test_an_optimizer_that_was_built_before_the_model_was_sharded() -> None:
    reference, model = build("stack"), build("stack")
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    sw.fully_shard(model, units=Block)
    sw.optimizer_in_backward(model, optimizers[1])
    batch = torch.randn(12, WIDTH).double()
    reference(batch).square().mean().backward()
    model(own_part(batch)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    step_all(optimizers)
    assert_same(model, reference, *optimizers)


@on_ranks(2)
def test_backward_of_a_forward_from_before_the_step_is_refused() -> None:
    model = sw.fully_shard(build("stack"), units=Block)
    sw.optimizer_in_backward(model, adamw(model.parameters()))
    x = torch.randn(4, WIDTH).double()
    for _ in range(2):
        first, second = model(x).sum(), model(x).sum()
        second.backward()
        with pytest.raises(sw.StepError, match=r"set_requires_gradient_sync\(False\)"):
            first.backward()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(sw.StepError, match=r"changed between a forward of .*in_backward steps"):
            loss.backward()
    first, second = model(x).sum(), model(x).sum()
    model.set_requires_gradient_sync(False)
    second.backward()
    model.set_requires_gradient_sync(True)
    first.backward()


def train(
    reference: nn.Module,
    model: nn.Module,
    forward: Callable[[nn.Module, Tensor], Tensor],
    optimizer: str = "adamw",
    batches: Callable[[], Tensor] = lambda: torch.randn(12, WIDTH).double(),
    steps: int = 3,
) -> None:
    """Train both ways; compare losses, parameters and states."""
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in (reference, model)]
    rates = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in optimizers]
    sw.optimizer_in_backward(model, optimizers[1])
    for step in range(steps):
        batch = batches()
        expected, loss = forward(reference, batch.clone()), forward(model, own_part(batch))
        for one in (expected, loss):
            one.backward()  # type: ignore[no-untyped-call]
        assert_close(mean_over_ranks(loss), expected.detach(), f"loss of step {step}")
        assert all(p.grad is None for p in model.parameters())
        for other, rate in zip(optimizers, rates, strict=True):
            other.step()
            other.zero_grad()
            rate.step()
        assert_same(model, reference, *optimizers)


def assert_same(
    model: nn.Module, reference: nn.Module, expected: Any = None, actual: Any = None
) -> None:
    """Compare parameters and optimizer states."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), name)
        if expected is not None:
            states = actual.state.get(p, {}), expected.state.get(q, {})
            assert states[0].keys() == states[1].keys(), name
            for key, value in states[1].items():
                assert_close(states[0][key], value, f"{key} of {name}")


def _train(
    strategy: str, optimizers: list[str], names: list[str], policy: sw.OffloadPolicy = NO_OFFLOAD
) -> None:
    options = options_of(strategy) | {"offload_policy": policy}
    for name in names:
        case = CASES[name]
        for optimizer in optimizers:
            train(
                *sharded_pair(name, **options),
                lambda one, batch, case=case: case.loss(one(batch)),  # type: ignore[misc]
                optimizer,
                lambda case=case: case.batch(12),  # type: ignore[misc]
                steps=2,
            )


class Reuser(nn.Module):
    """Recomputes one block twice, each time separately."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        for block in (first, second, first):
            x = checkpoint(block, x, use_reentrant=True)
        with torch.no_grad():  # never recomputed
            known = third(x)
        y: Tensor = third(x + known)
        return y


def _experts() -> tuple[list[int], list[list[int]]]:
    """The experts that this rank uses, and those that each rank uses."""
    of_all = [[0], [2, 0], [0], [2]][: world_size()]
    return of_all[rank()], of_all


def _choose(unused: Any, strategy: str) -> None:
    options = {"unused": unused, **options_of(strategy)}
    reference, model = sharded_pair(Choosing().double(), units=Block, **options)
    own, of_all = _experts()

    def forward(one: nn.Module, x: Tensor) -> Tensor:
        if one is model:
            loss: Tensor = model(x, own).square().mean()
            return loss
        if unused == "zeros":
            for p in reference.parameters():
                p.grad = torch.zeros_like(p)
        parts = zip(x.chunk(world_size()), of_all, strict=True)
        losses = [reference(part, experts).square().mean() for part, experts in parts]
        return torch.stack(losses).mean()

    train(reference, model, forward)


class Scaled(Stack):
    """Multiplies the output by a parameter, which has its gradient before all units."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale
        return y


class Turns(nn.Module):
    """Runs the next of four blocks in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        y: Tensor = self.layers[self.turn % 4](x)
        return y
