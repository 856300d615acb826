"""Gradients that wait for a later reduction are dropped, kept and restored as in one process."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import PlanError, StepError
from shardwise.schedule.events import EventKind
from tests.covering import covered_first
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.modules import FailingLinear, raise_together
from tests.runtime.one_process import (
    BATCH,
    assert_equal_models,
    full,
    options_of,
    own_part,
    runtime_of,
    world_size,
)
from tests.versions import needs_own_operators

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp"]
DELAYS = ["no reduction", "reduction over the row"]
UNREDUCED = "which is not reduced yet"


class Net(nn.Module):
    """Two blocks around a layer that can fail, with a frozen and a sometimes unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), FailingLinear(), Block()])
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.extra = nn.Parameter(torch.randn(WIDTH))
        self.uses_extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.frozen
        for block in self.blocks:
            x = block(x)
        return x * self.extra if self.uses_extra else x


class Loop:
    """A model, sharded or not, with an optimizer and the batches of a program."""

    def __init__(self, model: Any, path: Path) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        self.path = path
        self.seed = 0

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.model, sw.FSDPModule)

    def backward(self, *, last: bool = False, delay: str = DELAYS[0]) -> None:
        """Run a micro-batch."""
        if isinstance(self.model, sw.FSDPModule):
            is_whole = delay == DELAYS[0]
            self.model.set_requires_gradient_sync(last or not is_whole)
            self.model.set_requires_all_reduce(last or is_whole)
        self.seed += 1
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        batch = batch.to(self.model.extra.dtype)
        self.model(own_part(batch) if self.is_sharded else batch).square().mean().backward()

    @contextlib.contextmanager
    def failing(self, where: str) -> Iterator[None]:
        """Expect the failure of a micro-batch, which adds nothing to the gradients."""
        before = {p: None if p.grad is None else p.grad.clone() for p in self.plain_parameters}
        self.model.blocks[1].where = where
        self.model.blocks[1].ranks = dist.group.WORLD if self.is_sharded else None
        with pytest.raises(ValueError, match="it hurts"):
            yield
        self.model.blocks[1].where, self.model.blocks[1].ranks = "", None
        for parameter, gradient in before.items():
            parameter.grad = gradient

    @property
    def plain_parameters(self) -> Sequence[nn.Parameter]:
        return [] if self.is_sharded else list(self.model.parameters())


Event = Callable[[Loop, str], None]


def zero(loop: Loop, _delay: str) -> None:
    loop.optimizer.zero_grad()


def zero_in_place(loop: Loop, _delay: str) -> None:
    loop.model.zero_grad(set_to_none=False)
    loop.optimizer.zero_grad(set_to_none=False)


def drop_one(loop: Loop, _delay: str) -> None:
    next(loop.model.blocks[0].parameters()).grad = None
    loop.model.extra.grad = None
    loop.model.uses_extra = False


def zero_between_forward_and_backward(loop: Loop, _delay: str) -> None:
    batch = torch.ones(BATCH, WIDTH).double()
    loss = loop.model(own_part(batch) if loop.is_sharded else batch).square().mean()
    loop.optimizer.zero_grad()
    loss.backward()


def fail_in_forward(loop: Loop, delay: str) -> None:
    with loop.failing("forward"):
        loop.backward(delay=delay)


def fail_without_gradients(loop: Loop, _delay: str) -> None:
    with loop.failing("forward"), torch.no_grad():
        loop.model(torch.ones(2, WIDTH).double())


def fail_in_backward(loop: Loop, delay: str) -> None:
    with loop.failing("backward"):
        loop.backward(delay=delay)


def fail_in_the_last_backward(loop: Loop, _delay: str) -> None:
    with loop.failing("backward"):
        loop.backward(last=True)


def fail_and_zero(loop: Loop, _delay: str) -> None:
    with loop.failing("backward"):
        loop.backward(last=True)
    loop.optimizer.zero_grad()


def update(loop: Loop, delay: str = DELAYS[0], error: Exception | None = None) -> None:
    """Run two micro-batches and step the optimizer, in a transaction that may fail."""
    with sw.transaction(loop.model, loop.optimizer):
        loop.backward(delay=delay)
        loop.backward(last=True)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if error is not None:
            raise_together(error, dist.group.WORLD)


def undo_a_transaction(loop: Loop, delay: str) -> None:
    if loop.is_sharded:
        with pytest.raises(KeyError, match="undone"):
            update(loop, delay, KeyError("undone"))
    else:
        loop.seed += 2


def freeze(loop: Loop, _delay: str) -> None:
    for parameter in loop.model.blocks[2].parameters():
        parameter.requires_grad_(False)
    loop.model.first.bias.requires_grad_(False)


def thaw(loop: Loop, _delay: str) -> None:
    loop.model.frozen.requires_grad_(True)


def convert_to_the_same_dtype(loop: Loop, _delay: str) -> None:
    loop.model.double().to("cpu").eval().train()


def gather(loop: Loop, _delay: str) -> None:
    if loop.is_sharded:
        with sw.gathered(loop.model):
            assert loop.model.extra.grad is None


def zero_while_gathered(loop: Loop, _delay: str) -> None:
    with sw.gathered(loop.model) if loop.is_sharded else contextlib.nullcontext():
        loop.model.zero_grad()


def copy_the_model(loop: Loop, _delay: str) -> None:
    twin = copy.deepcopy(loop.model)
    assert all(parameter.grad is None for parameter in twin.parameters())


def save_and_load(loop: Loop, _delay: str) -> None:
    if loop.is_sharded:
        sw.save(loop.path, model=loop.model, optimizer=loop.optimizer)
        sw.load(loop.path, model=loop.model, optimizer=loop.optimizer)


def reduce_once(loop: Loop, _delay: str) -> None:
    loop.backward(last=True)


def fail_in_a_hook(loop: Loop, _delay: str) -> None:
    """Hooks run while reduced gradients are handed over, in the middle of a backward."""
    if loop.is_sharded:
        hook = loop.model.blocks[0].get_parameter("up.weight").register_hook(_raise)
        with pytest.raises(ValueError, match="a hook"):
            loop.backward(last=True)
        hook.remove()
    else:
        loop.seed += 1


def _raise(_gradient: Tensor) -> None:
    raise_together(ValueError("a hook"), dist.group.WORLD)


def undo_two_transactions(loop: Loop, delay: str) -> None:
    undo_a_transaction(loop, delay)
    undo_a_transaction(loop, delay)


def infer_with_a_thawed_parameter(loop: Loop, delay: str) -> None:
    thaw(loop, delay)
    with torch.inference_mode():
        loop.model(torch.ones(2, WIDTH).double())


def keep(_loop: Loop, _delay: str) -> None:
    """Nothing."""


EVENTS: list[Event] = [
    zero,
    zero_in_place,
    drop_one,
    zero_between_forward_and_backward,
    fail_in_forward,
    fail_without_gradients,
    fail_in_backward,
    fail_in_the_last_backward,
    fail_and_zero,
    undo_a_transaction,
    freeze,
    thaw,
    convert_to_the_same_dtype,
    gather,
    zero_while_gathered,
    copy_the_model,
    save_and_load,
    reduce_once,
    fail_in_a_hook,
    undo_two_transactions,
    infer_with_a_thawed_parameter,
]


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def shard(strategy: str, **options: Any) -> Any:
    options |= options_of(strategy)
    return sw.fully_shard(make(), units={Block, FailingLinear}, **options)


def run(model: nn.Module, events: Sequence[Event], delay: str, path: Path) -> Loop:
    loop = Loop(model, path)
    loop.backward(last=True)  # a step before, so that there are optimizer states
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    for event in events:
        loop.backward(delay=delay)
        event(loop, delay)
    loop.backward(last=True)
    return loop


def compare(strategy: str, events: Sequence[Event], delay: str, path: Path) -> Loop:
    loop = run(shard(strategy), events, delay, path)
    alone = run(make(), events, delay, path)
    assert_equal_models(loop.model, alone.model, 1)
    for one in (loop, alone):
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.backward(last=True)
    assert_equal_models(loop.model, alone.model, 2)
    return loop


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_was_accumulated_is_reduced_after_an_exception(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net().double()
    alone = Loop(copy.deepcopy(net), tmp_path)
    sharded = Loop(sw.fully_shard(net, units=Block), tmp_path)
    for loop in (alone, sharded):
        loop.backward()
        with loop.failing(where):
            loop.backward()
        loop.backward()
    sharded.model.set_requires_gradient_sync(True)
    handle = sharded.model.finalize_backward(async_op=True)
    handle.wait()
    for (name, p), q in zip(
        sharded.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, rtol=0, atol=1e-12)
    assert sharded.model.finalize_backward() is None  # nothing is left


@on_ranks(2)
def test_gradients_are_not_reduced_where_ranks_may_differ(tmp_path: Path) -> None:
    loop = Loop(sw.fully_shard(Net().double(), units=Block), tmp_path)
    loop.backward()
    loop.model.set_requires_gradient_sync(True)
    with sw.gathered(loop.model), pytest.raises(StepError, match="cannot be reduced in"):
        loop.model.finalize_backward()
    with pytest.raises(PlanError, match=r"blocks\.0 is a unit inside a sharded model"):
        loop.model.blocks[0].finalize_backward()
    loop.model.finalize_backward()
    with torch.device("meta"):
        deferred: Any = sw.fully_shard(nn.Linear(2, 2))
    deferred.finalize_backward()  # before there is anything, it does nothing


@on_ranks(2)
@pytest.mark.parametrize(
    ("event", "strategy"),
    covered_first(product(EVENTS, STRATEGIES)),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_between_micro_batches(event: Event, strategy: str, tmp_path: Path) -> None:
    compare(strategy, [event, keep], DELAYS[0], tmp_path / "saved")


@on_ranks(4)
@pytest.mark.parametrize(
    ("event", "strategy"),
    covered_first(product(EVENTS, ["hsdp", "hfsdp"]), leave=["hfsdp"]),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_sums_over_the_row(event: Event, strategy: str, tmp_path: Path) -> None:
    loop = compare(strategy, [event, keep], DELAYS[1], tmp_path / "saved")
    assert not runtime_of(loop.model).pools.of_gradients.allocated_bytes, "each sum is freed once"


@on_ranks(2)
@pytest.mark.parametrize(
    "event", [fail_in_a_hook, fail_in_the_last_backward, undo_two_transactions, zero_in_place]
)
def test_gradients_that_are_added_to_reduced_ones(event: Event, tmp_path: Path) -> None:
    compare("fsdp", [reduce_once, event, keep], DELAYS[0], tmp_path / "saved")


@on_ranks(2)
def test_a_backward_that_fails_leaves_no_gradient_where_there_was_none() -> None:
    loop = Loop(shard("fsdp"), Path())
    loop.model.uses_extra = False
    hook = loop.model.blocks[0].get_parameter("up.weight").register_hook(_raise)
    with pytest.raises(ValueError, match="a hook"):
        loop.backward(last=True)
    hook.remove()
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    loop.backward(last=True)
    assert loop.model.extra.grad is None


@on_ranks(2)
def test_sums_that_a_reduction_may_still_read_are_not_freed() -> None:
    """A transaction is undone while the reductions of its backward may be in flight."""
    loop = Loop(shard("fsdp"), Path())
    loop.backward(delay=DELAYS[1])
    accumulated = next(iter(runtime_of(loop.model).units[0].gradients)).accumulated
    sums, _ = accumulated.take_sums()  # as a reduction does
    assert sums is not None
    expected, pool = sums.clone(), accumulated.pool
    in_use = pool.allocate_tensor(4 * len(sums), sums.dtype)  # so that the pool keeps idle blocks
    accumulated.drop()
    pool.allocate_tensor(len(sums), sums.dtype).fill_(torch.nan)
    assert torch.equal(sums, expected)
    pool.free(in_use.untyped_storage())


@on_ranks(4)
def test_backwards_that_fail_take_no_memory() -> None:
    """Their sums over the row are freed, and those of earlier micro-batches are kept."""
    net: Any = make()
    net.blocks.extend([Block().double() for _ in range(2)])  # they are reduced before it fails
    units = {Block, FailingLinear}
    loop = Loop(sw.fully_shard(net, units=units, **options_of("hsdp")), Path())
    loop.backward(delay=DELAYS[1])
    accumulated = next(iter(runtime_of(loop.model).units[-1].gradients)).accumulated
    held = []
    for _ in range(3):
        with loop.failing("backward"):
            loop.backward(delay=DELAYS[1])
        held.append(accumulated.pool.held_bytes)
    assert held[0] == held[1] == held[2]


@on_ranks(2)
def test_gradients_that_were_all_dropped_take_no_memory() -> None:
    loop = Loop(shard("fsdp"), Path())
    loop.backward(delay=DELAYS[1])
    gradients = [one for unit in runtime_of(loop.model).units for one in unit.gradients]
    assert all(one.accumulated.is_active for one in gradients)
    loop.model.zero_grad()
    with torch.no_grad():
        loop.model(torch.ones(1, WIDTH).double())
    assert not any(one.accumulated.is_active for one in gradients)
    assert {one.accumulated.take_sums()[0] for one in gradients} == {None}


@on_ranks(2)
def test_a_refused_conversion_changes_nothing() -> None:
    loop = Loop(shard("fsdp"), Path())
    sw.optimizer_in_backward(loop.model, loop.optimizer)
    with pytest.raises(PlanError, match="optimizer_in_backward steps its"):
        loop.model.float()
    assert all(parameter.dtype == torch.float64 for parameter in loop.model.parameters())
    loop.backward(last=True)


@on_ranks(2)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 24))]
)
def test_several_events(seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(EVENTS), (4,), generator=generator).tolist()
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    compare(strategy, [EVENTS[number] for number in numbers], DELAYS[0], tmp_path / "saved")


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "dim"},
        {"offload_policy": sw.CPUOffloadPolicy()},
        {"unused": "error"},
        {"prefetch": 0, "reshard_after_forward": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options: dict[str, object], tmp_path: Path) -> None:
    events = [fail_in_backward, zero, fail_in_the_last_backward, undo_a_transaction, freeze]
    loop = run(shard("fsdp", **options), events, DELAYS[0], tmp_path)
    alone = run(make(), events, DELAYS[0], tmp_path)
    assert_equal_models(loop.model, alone.model, 1)


@on_ranks(2)
def test_a_second_attempt_after_a_transaction_has_the_same_bits() -> None:
    def attempt(*, fails_first: bool) -> list[Tensor]:
        loop = Loop(shard("fsdp"), Path())
        loop.backward()
        if fails_first:
            with pytest.raises(KeyError):
                update(loop, error=KeyError())
        loop.seed = 1
        update(loop)
        return [full(parameter.detach()) for parameter in loop.model.parameters()]

    pairs = zip(attempt(fails_first=True), attempt(fails_first=False), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_converted_model_keeps_what_was_accumulated(strategy: str) -> None:
    def train(model: nn.Module) -> Any:
        loop = Loop(model.float(), Path())
        loop.backward()
        loop.model.double()
        loop.backward(last=True)
        return loop.model

    model, alone = train(shard(strategy)), train(make())
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-5, atol=1e-6, msg=name)


@on_ranks(2)
def test_micro_batches_after_a_conversion_are_not_reduced_either() -> None:
    model = shard("fsdp")
    model.set_requires_gradient_sync(False)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        kinds = {event.kind for event in sw.ledger(model).events()}
        assert EventKind.BACKWARD in kinds
        assert EventKind.REDUCE not in kinds


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_operations_that_need_the_gradient_say_what_to_do(granularity: str) -> None:
    loop = Loop(shard("fsdp", granularity=granularity), Path())
    parameters = list(loop.model.parameters())
    loop.backward()
    gradient = loop.model.extra.grad
    assert gradient is not None
    assert (gradient.shape, gradient.dtype) == ((WIDTH,), torch.float64)
    for operation in (
        lambda: sw.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        loop.optimizer.step,
        gradient.norm,
        gradient.full_tensor,
        gradient.numpy,
        lambda: gradient.add_(loop.model.extra.detach(), alpha=0.5),
        lambda: gradient * 2,
        lambda: torch.stack([gradient, torch.ones(WIDTH)]),
        lambda: copy.deepcopy(gradient),
    ):
        with pytest.raises(StepError, match=f"grad: .* {UNREDUCED}.*run the last micro-batch"):
            operation()
    with pytest.raises(PlanError, match="has a gradient already; call optimizer"):
        sw.optimizer_in_backward(loop.model, loop.optimizer)
    loop.backward(last=True)
    loop.optimizer.step()


@needs_own_operators
@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"strategy": "fsdp"}, {"strategy": "ddp"}, {"strategy": "fsdp", "granularity": "dim"}],
)
def test_a_penalty_on_sharded_parameters_is_added_in_every_micro_batch(
    options: dict[str, Any],
) -> None:
    models: list[Any] = [make(), shard(**options)]
    for micro_batch in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        models[1].set_requires_gradient_sync(micro_batch == 2)
        for model, x in zip(models, (batch, own_part(batch)), strict=True):
            penalty = sum(full(p.square().sum()) for p in model.parameters() if p.requires_grad)
            (model(x).square().mean() + 0.1 * penalty).backward()
    assert_equal_models(models[1], models[0], 0)


@on_ranks(2)
def test_an_exception_on_one_rank_leaves_what_each_rank_has_accumulated() -> None:
    loop = Loop(shard("fsdp"), Path())
    loop.backward()
    if torch.distributed.get_rank() == 1:
        loop.model.blocks[1].where = "forward"
    with pytest.raises((ValueError, StepError)):
        reduce_once(loop, "")
    loop.model.blocks[1].where = ""
    loop.optimizer.zero_grad()
    loop.seed = 7
    loop.backward()
    loop.backward(last=True)
    alone = Loop(make(), Path())
    alone.seed = 7
    alone.backward()
    alone.backward()
    assert world_size() == 2
    assert_equal_models(loop.model, alone.model, 1)
