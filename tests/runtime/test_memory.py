"""C3: gathered memory is bounded, and only shards stay between steps."""

import gc
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise.plan.plan import Plan
from shardwise.schedule.events import EventKind
from tests.covering import covered_first
from tests.models import CASES, WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import own_part, runtime_of, world_size
from tests.versions import needs_swap
from tests.waiting import eventually
from tests.watching import without_frames


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "prefetch"),
    covered_first(product(("sequential", "stack", "gpt", "unused and reused", "lora"), (1, 2, 0))),
)
def test_gathered_bytes_never_exceed_one_unit_and_those_ahead(name: str, prefetch: int) -> None:
    case = CASES[name]
    model = build(name)
    sw.fully_shard(model, units=case.units, prefetch=prefetch)
    runtime = runtime_of(model)
    for _ in range(3):
        loss = case.loss(model(own_part(case.batch(12))))
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            model(own_part(case.batch(12)))
    ledger = sw.ledger(model)
    assert ledger.gathered_bytes == 0
    assert 0 < ledger.peak_gathered_bytes() <= _bound(runtime.plan, prefetch)
    # The pools held no more than that, plus two reductions and their results.
    gradients = sorted((unit.gradient_bytes for unit in runtime.plan.units), reverse=True)
    reductions = 2 * sum(gradients[:2])
    pools = runtime.pools
    gathered = 0  # in shared and in private memory
    for pool in (pools.gathered, pools.own):
        assert pool.held_bytes <= pool.peak_bytes
        gathered += pool.peak_bytes
    alignment = 64 * (2 + prefetch)
    assert gathered <= _bound(runtime.plan, prefetch) + alignment
    assert pools.peak_bytes - gathered <= 2 * reductions
    assert pools.gradients.held_bytes == pools.enclosing_gradients.held_bytes == 0
    outstanding = 0
    for event in ledger.events():
        outstanding += (event.kind is EventKind.REDUCE) - (event.kind is EventKind.FINISH_REDUCE)
        assert outstanding <= 2, "at most two reduce buffers are alive"


@on_ranks(1, 2, 4)
def test_a_rank_keeps_its_share_of_parameters_gradients_and_states() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    parameters = list(model.parameters())
    one_process = sum(parameter.nbytes for parameter in parameters)
    sw.fully_shard(model, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    # A unit has 4 parameters; they and its shard are each padded to 16 bytes.
    padding = 3 * (4 * 16 + 16 * world_size())
    for kept in (
        _local_bytes([p.detach() for p in model.parameters()]),
        _local_bytes([p.grad for p in model.parameters() if p.grad is not None]),
        _local_bytes([s["exp_avg"] for s in optimizer.state.values()]),
        _local_bytes([s["exp_avg_sq"] for s in optimizer.state.values()]),
        sum(flat.codec.shard.nbytes for unit in runtime_of(model).units for flat in unit.flats),
    ):
        assert abs(kept * world_size() - one_process) <= padding * world_size()
        assert kept <= one_process / world_size() + padding


@on_ranks(1, 2)
def test_a_deleted_model_frees_its_memory_without_the_cycle_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = build("stack")
        sw.fully_shard(model, units=Block)
        for _ in range(2):
            model(torch.randn(4, WIDTH).double()).sum().backward()
        model.set_requires_gradient_sync(False)
        model(torch.randn(4, WIDTH).double()).sum().backward()  # leaves gradients unreduced
        model(torch.randn(4, WIDTH).double())  # leaves a unit gathered
        runtime = runtime_of(model)
        watched: list[weakref.ref[Any]]
        watched = [weakref.ref(runtime), weakref.ref(runtime.pools), weakref.ref(model)]
        watched += [weakref.ref(flat) for unit in runtime.units for flat in unit.flats]
        watched += [weakref.ref(p) for p in model.parameters()]
        watched += [weakref.ref(p.dense) for unit in runtime.units for p in unit.parameters]
        del runtime
        del model
        assert eventually(lambda: all(reference() is None for reference in watched)), watched
    finally:
        gc.enable()


@on_ranks(1, 2)
@pytest.mark.parametrize("way", ["plain", "with offloaded activations"])
def test_a_forward_without_backward_keeps_nothing_alive(way: str) -> None:
    """In the first steps too, in which the engine watches tensors that autograd saves."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    sw.fully_shard(model, units=nn.Sequential)
    runtime = weakref.ref(runtime_of(model))
    output: list[weakref.ref[Tensor]] = []
    act = model.get_submodule("1.1")
    act.register_forward_hook(lambda _module, _inputs, out: output.append(weakref.ref(out)))
    with sw.offload_activations(model) if way != "plain" else nullcontext():
        model(torch.randn(2, 4)).sum()
    del model
    gc.collect()
    assert eventually(lambda: output[0]() is None)  # tanh saves its output
    assert eventually(lambda: runtime() is None)


def _have_expired(memory: Iterable[StorageWeakRef]) -> bool:
    return all(reference.expired() for reference in memory)  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_gradients_live_as_long_as_somebody_holds_them() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    sw.fully_shard(model, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memory: list[StorageWeakRef] = []
    for _ in range(3):
        # While the heartbeat reads a frame of this thread, the frame's variables stay alive.
        assert eventually(partial(_have_expired, memory)), "between steps there are none"
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        local = _local_gradients(model)
        memory = [StorageWeakRef(one.untyped_storage()) for one in local]  # type: ignore[no-untyped-call]
        assert len({reference.cdata for reference in memory}) == 4, "one piece of memory a unit"
        del local
        assert not any(reference.expired() for reference in memory)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    held = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    for before, now in zip(first, held, strict=True):
        assert isinstance(before, sw.ShardedTensor)
        assert isinstance(now, sw.ShardedTensor)
        assert torch.equal(before.to_local(), now.to_local()), "a gradient that is held stays"


@needs_swap
@on_ranks(2)
def test_data_parallel_gradients_are_reduced_where_they_are() -> None:
    with without_frames():  # a gradient in one would be held
        _check_where_gradients_are_reduced()


def _check_where_gradients_are_reduced() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    sw.fully_shard(model, units=Block, strategy="ddp")
    pools = runtime_of(model).pools
    places: set[tuple[int, ...]] = set()
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        assert pools.gradients.peak_bytes == 0, "buffers are the gradients"
        local = _local_gradients(model)
        places.add(tuple(one.data_ptr() for one in local))
        memory = [StorageWeakRef(one.untyped_storage()) for one in local]  # type: ignore[no-untyped-call]
        del local
        model.zero_grad()
        assert not any(reference.expired() for reference in memory)  # type: ignore[no-untyped-call]
    assert len(places) == 1, "that keep their memory"
    model(torch.randn(4, 16)).square().mean().backward()
    held = _local_gradients(model)
    values = [local.clone() for local in held]
    model.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    assert all(map(torch.equal, held, values)), "unless somebody holds them"
    model.zero_grad()
    before = [p.grad for p in model.parameters()]
    model(torch.randn(4, 16)).square().mean().backward()
    first = [p.grad for p in model.parameters()]
    model(torch.randn(4, 16)).square().mean().backward()
    assert before == [None] * len(first)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), first, strict=True))
    assert pools.gradients.peak_bytes > 0, "there were some to add to"
    assert pools.gradients.held_bytes == 0


@on_ranks(2)
def test_frozen_parameters_own_no_gradient_buffer() -> None:
    model = build("frozen")
    sw.fully_shard(model, units=Block)
    model(torch.randn(4, WIDTH).double()).sum().backward()
    for unit in runtime_of(model).units:
        for flat in unit.flats:
            trainable = all(p.sharded.requires_grad for p in flat.parameters)
            assert (flat.gradients is not None) == trainable


def _bound(plan: Plan, prefetch: int) -> int:
    """The bytes of the root, which is always in use, and of the largest adjacent units."""
    inner = sorted((unit.gathered_bytes for unit in plan.units[1:]), reverse=True)
    return plan.units[0].gathered_bytes + sum(inner[: 1 + prefetch])


def _local_bytes(tensors: list[Tensor]) -> int:
    return sum(t.to_local().nbytes for t in tensors if isinstance(t, sw.ShardedTensor))


def _local_gradients(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [grad.to_local() for grad in grads if isinstance(grad, sw.ShardedTensor)]
