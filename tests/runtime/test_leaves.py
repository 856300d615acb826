"""What a step of a reproducible model accepts, what it refuses, and its sums and random numbers."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import api
from shardwise.comm import communicator as communicators
from shardwise.errors import CheckpointError, PlanError, ShardedTensorError, StepError
from shardwise.fsdp import fully_shard as fully_shard_as_fsdp2
from shardwise.replicas.elastic import check_replica
from shardwise.runtime.module import runtime_of_root
from tests.ranks import on_ranks, run_on
from tests.runtime.leaf_runs import (
    LEAVES,
    Options,
    batch_of,
    bits,
    optimizer_of,
    sharded,
    step_of,
    train,
)


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    every: dict[str, Any] = {"units": nn.Linear, "reproducible": LEAVES} | options
    return sw.fully_shard(model, **every)


def _backward(model: nn.Module, leaf: int) -> Tensor:
    generator = torch.Generator().manual_seed(leaf)
    loss: Tensor = model(torch.randn(3, 64, generator=generator)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# -- sums ------------------------------------------------------------------------------------------


def _sums() -> tuple[str, ...]:
    model = sharded(Options("gpt"))
    for leaf in sw.leaves(model):
        with sw.leaf_rng(0, 0, leaf):
            model(batch_of(0, leaf)).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = [torch.nn.utils.get_total_norm(gradients)]
    for order in (2.0, 1.0, 0.0, 3.0, math.inf):
        found += [torch.linalg.vector_norm(x, order) for x in gradients]
    found += [x.sum() for x in gradients] + [x.mean() for x in parameters]
    found += [(x > 0).sum() for x in parameters]  # integers
    for x in gradients:
        assert isinstance(x, DTensor)
        exact = x.full_tensor().double()
        torch.testing.assert_close(x.norm().double(), exact.norm(), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(x.sum().double(), exact.sum(), rtol=1e-3, atol=1e-5)
    before = bits(gradients)
    found.append(torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True))
    assert before != bits(gradients)
    return bits(found), bits(gradients)


def test_norms_and_sums_have_the_same_bits() -> None:
    """Also those of torch's functions, which call ours."""
    [expected] = run_on(1, _sums)
    for size in (2, 4):
        assert run_on(size, _sums) == [expected] * size


def _token_mean(accumulate: Any) -> str:
    """Micro-batches with unequal numbers of tokens, one without any."""
    model = _model()

    def loss_sum(leaf: int) -> Tensor:
        rows = torch.randn(leaf, 64, generator=torch.Generator().manual_seed(leaf))
        total: Tensor = model(rows).square().mean(1).sum()
        return total

    own = sw.leaves(model)
    loss = sw.backward(model, own, loss_sum, lambda leaf: leaf, accumulate=accumulate)
    weight = torch.tensor(sw.token_weight(model, sum(own)))
    return bits([loss, weight, *(p.grad for p in model.parameters())])


@pytest.mark.parametrize("accumulate", ["shards", "whole"])
def test_the_mean_over_tokens_has_the_same_bits(accumulate: str) -> None:
    found = [one for size in (1, 2, 4) for one in run_on(size, _token_mean, accumulate)]
    assert len(set(found)) == 1


def _over_torch_queues(options: Options) -> Any:
    """Train without the queues for CPUs of one host: over Gloo, as it would be over NCCL."""
    with mock.patch.object(communicators.parts, "host_queues", None):
        communicators._communicators.clear()
        try:
            return train(options, range(2))
        finally:
            communicators._communicators.clear()


@pytest.mark.parametrize(("strategy", "replicas"), [("fsdp", 0), ("hsdp", 2)])
def test_collectives_of_torch_have_the_same_bits(strategy: str, replicas: int) -> None:
    [expected] = run_on(1, train, Options("gpt"), range(2))
    options = Options("gpt", strategy=strategy, replicas=replicas)
    assert run_on(4, _over_torch_queues, options) == [expected] * 4


OPTIONS: dict[str, dict[str, Any]] = {
    "offloaded": {"offload_policy": sw.CPUOffloadPolicy()},
    "one communicator": {"communicators": "shared"},
    "rows": {"granularity": "row"},
    "blocks of rows": {"granularity": sw.block(3)},
    "whole tensors": {"granularity": {"*.weight": "tensor"}},
    "subgroups": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": False, "prefetch": 3},
    "zeros": {"unused": "zeros"},
    "one unit": {"units": None},
}


def _gradients(options: dict[str, Any]) -> str:
    model = _model(**options)
    for leaf in sw.leaves(model):
        _backward(model, leaf)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return bits([norm, *(p.grad for p in model.parameters())])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_do_not_change_bits(name: str) -> None:
    [expected] = run_on(1, _gradients, {})
    assert run_on(4, _gradients, OPTIONS[name]) == [expected] * 4


@pytest.mark.parametrize(
    ("param", "reduce"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_mixed_precision_has_the_same_bits(param: str, reduce: str) -> None:
    dtypes = getattr(torch, param), getattr(torch, reduce)
    options = {"mp_policy": sw.MixedPrecisionPolicy(*dtypes)}
    [expected] = run_on(1, _gradients, options)
    for size in (2, 4):
        assert run_on(size, _gradients, options) == [expected] * size


def _on_a_permuted_mesh(strategy: str) -> str:
    ranks = torch.tensor([[2, 0], [3, 1]])
    place = ranks.flatten().tolist().index(dist.get_rank())
    mesh = DeviceMesh("cpu", ranks if strategy != "fsdp" else ranks.flatten())
    model = _model(strategy=strategy, mesh=mesh)
    assert [*sw.leaves(model)] == [2 * place, 2 * place + 1]
    return _gradients({"strategy": strategy, "mesh": mesh})


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "hfsdp"])
def test_leaves_follow_the_order_of_the_mesh(strategy: str) -> None:
    [expected] = run_on(1, _gradients, {})
    assert run_on(4, _on_a_permuted_mesh, strategy) == [expected] * 4


def _block_by_block() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for block in (model[0], model[2], model):
        sw.fully_shard(block, reproducible=LEAVES)
    for leaf in sw.leaves(model):
        _backward(model, leaf)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return bits([norm, *(p.grad for p in model.parameters())])


def test_calls_for_each_block_have_the_same_bits() -> None:
    [expected] = run_on(1, _gradients, {})
    assert run_on(4, _block_by_block) == [expected] * 4


@on_ranks(2)
def test_the_gradient_is_the_mean_over_all_micro_batches() -> None:
    model = _model()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for leaf in sw.leaves(model):
        _backward(model, leaf)
    for leaf in range(LEAVES):
        _backward(reference, leaf)
    for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(own.grad, DTensor)
        assert whole.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad / LEAVES)


# -- steps -----------------------------------------------------------------------------------------


def _after(events: Callable[[nn.Module], None]) -> str:
    """The gradients of a step in whose middle ``events`` happen."""
    model = _model()
    *first, last = sw.leaves(model)
    for leaf in first:
        _backward(model, leaf)
        events(model)
    _backward(model, last)
    return bits(p.grad for p in model.parameters())


def _nothing(_model: nn.Module) -> None:
    pass


def _fail(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 3))


def _fail_in_backward(model: nn.Module) -> None:
    def fail(_gradient: Tensor) -> None:
        raise OSError("in backward")

    x = torch.randn(2, 64, requires_grad=True)
    x.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(OSError, match="in backward"):
        model(x).sum().backward()


def _undo(model: nn.Module) -> None:
    def step() -> None:
        with sw.transaction(model):
            _backward(model, 99)
            raise OSError("undone")

    with pytest.raises(OSError, match="undone"):
        step()


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(2, 64))


@pytest.mark.parametrize("events", [_fail, _fail_in_backward, _undo, _evaluate])
def test_micro_batches_that_do_not_count_leave_the_others(
    events: Callable[[nn.Module], None],
) -> None:
    [expected] = run_on(1, _after, _nothing)
    assert run_on(2, _after, events) == [expected] * 2


class FrozenFirst(nn.Module):
    """Whose first micro-batches train nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.trained = nn.Linear(64, 64)

    def forward(self, x: Tensor, share: float) -> Tensor:
        y: Tensor = self.frozen(x)
        return y + share * self.trained(y) if share else y


def _with_leaves_that_train_nothing() -> tuple[str, list[int]]:
    torch.manual_seed(0)
    model = sw.fully_shard(FrozenFirst(), reproducible=4)
    counts = []
    for leaf in sw.leaves(model):
        x = torch.full((2, 64), leaf + 1.0, requires_grad=True)
        model(x, float(leaf % 2)).square().mean().backward()
        steps = runtime_of_root(model).scheduler.leaves
        assert steps is not None
        counts.append(steps.num_done)
    return bits([p.grad for p in model.parameters() if p.grad is not None]), counts


def test_a_micro_batch_that_trains_nothing_counts() -> None:
    [(expected, counts)] = run_on(1, _with_leaves_that_train_nothing)
    assert counts == [1, 2, 3, 0]
    for found, counts in run_on(2, _with_leaves_that_train_nothing):
        assert (found, counts) == (expected, [1, 0])


@on_ranks(2)
def test_means_are_summed_in_float64() -> None:
    model = _model()
    losses = [torch.tensor(3e4, dtype=torch.float16) for _ in sw.leaves(model)]
    assert torch.equal(sw.leaf_mean(model, losses), losses[0])
    with pytest.raises(ValueError, match="expected scalars"):
        sw.leaf_mean(model, [torch.ones(2)] * 4)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_begins_the_step_anew(set_to_none: bool) -> None:
    model, other = _model(), _model()
    first, *_ = sw.leaves(model)
    _backward(model, first)
    model.zero_grad(set_to_none=set_to_none)
    for leaf in sw.leaves(model):
        _backward(model, leaf)
        _backward(other, leaf)
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in other.parameters())


@on_ranks(2)
def test_the_optimizer_waits_for_all_micro_batches() -> None:
    model = _model()
    optimizer = optimizer_of(model, "adamw")
    _backward(model, sw.leaves(model)[0])
    with pytest.raises(StepError, match=r"the last of its 4 micro-batches .* first run all"):
        optimizer.step()
    with pytest.raises(StepError, match="the last of its 4"):
        sw.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(StepError, match="after 1 of this rank's 4 micro-batches"):
        model.double()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_model_may_not_be_called_twice_in_a_micro_batch(size: int) -> None:
    run_on(size, _call_twice)


def _call_twice() -> None:
    model = _model()
    first, *others = sw.leaves(model)
    x = torch.randn(2, 64)
    with pytest.raises(StepError, match="called several times before one backward"):
        (model(x).sum() + model(x).sum()).backward()
    _backward(model, first)  # the model is usable
    for leaf in others:
        _backward(model, leaf)
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def _one_backward_more() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    uses: list[Callable[[], object]] = [
        optimizer.step,
        fused.step,
        lambda: model.zero_grad(set_to_none=False),
        lambda: sw.clip_grad_norm_(model.parameters(), 1e-3),
        model.zero_grad,
    ]
    for use in uses:  # an optimizer uses the gradients, or they are dropped or changed
        for leaf in sw.leaves(model):
            _backward(model, leaf)
        use()
        _evaluate(model)
    own = sw.leaves(model)
    for leaf in own:
        _backward(model, leaf)
    with pytest.raises(StepError, match=rf"one backward more than the {len(own)} of a step"):
        _backward(model, own[0])
    model.zero_grad()
    _backward(model, own[0])


@pytest.mark.parametrize("size", [1, 2, 8])
def test_more_backwards_than_micro_batches_are_noticed(size: int) -> None:
    run_on(size, _one_backward_more)


@on_ranks(2)
def test_a_rank_that_skips_a_micro_batch_is_named() -> None:
    model = _model(strategy="ddp")
    optimizer = optimizer_of(model, "adamw")
    rank = dist.get_rank()
    for leaf in sw.leaves(model)[1:]:
        _backward(model, leaf)
    with pytest.raises(StepError) as found:  # rank 1 waits for rank 0
        optimizer.step() if rank == 0 else _backward(model, 0)
    assert "the last of its 4 micro-batches on this rank" in str(found.value)
    assert rank == 0 or "rank 0" in str(found.value)
    model.zero_grad()
    for leaf in sw.leaves(model):
        _backward(model, leaf)
    optimizer.step()


@on_ranks(2)
def test_checkpoints_are_refused_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model = _model()
    sw.save(tmp_path / "before", model=model)
    _backward(model, sw.leaves(model)[0])
    with pytest.raises(CheckpointError, match="after 1 of this rank's 4 micro-batches"):
        sw.save(tmp_path / "new", model=model)
    with pytest.raises(CheckpointError, match="after 1 of this rank's 4 micro-batches"):
        sw.load(tmp_path / "before", model=model)
    model.zero_grad()
    sw.save(tmp_path / "new", model=model)


@on_ranks(2)
def test_methods_that_change_the_sum_are_refused() -> None:
    model: Any = _model()
    calls: list[Callable[[], None]] = [
        lambda: model.set_requires_gradient_sync(False),
        lambda: model.set_requires_all_reduce(False),
        lambda: model.set_gradient_divide_factor(3.0),
        lambda: model.set_all_reduce_hook(print),
    ]
    for call in calls:
        with pytest.raises(PlanError, match="the model is reproducible, so the engine sums"):
            call()


# -- refusals --------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_hold_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reproducible": 6}, r"reproducible=6: expected .* a power of two"),
        ({"reproducible": 0}, "reproducible=0: expected"),
        ({"reproducible": True}, "reproducible=True: expected"),
        ({"reproducible": 1}, r"reproducible=1 on 2 ranks: .* divides 1"),
        ({"wire": sw.Wire(reduce="int8")}, "reproducible=8 with a Wire"),
        ({"wire": sw.Wire(gather="int8")}, "reproducible=8 with a Wire"),
        ({"granularity": "dim"}, "0.weight: reproducible=... with granularity='dim'"),
    ]
    for options, message in refused:
        with pytest.raises(PlanError, match=message):
            _model(**options)
    with pytest.raises(PlanError, match="granularity='dim'"):
        fully_shard_as_fsdp2(nn.Linear(4, 4), reproducible=2)
    with pytest.raises(PlanError, match=r"1 \(BatchNorm1d\) keeps statistics"):
        sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), reproducible=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model[0], reproducible=2)
    with pytest.raises(PlanError, match="0 was sharded with reproducible=2"):
        sw.fully_shard(model, reproducible=4)
    with pytest.raises(PlanError, match="reproducible=None, but 0 was sharded with"):
        sw.fully_shard(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"1.bias, 1.weight in ignored_params are trainable"):
        sw.fully_shard(model, reproducible=2, ignored_params=[*model[1].parameters()])
    for norm in (nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)):
        with pytest.raises(PlanError, match="use a norm"):
            sw.fully_shard(nn.Sequential(nn.Linear(4, 4), norm), reproducible=2)
    for spectral in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = nn.Sequential(nn.Linear(4, 4), spectral(nn.Linear(4, 4)))
        with pytest.raises(PlanError, match="each forward changes buffers of 1 "):
            sw.fully_shard(model, reproducible=2)
    for constant in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal):
        sw.fully_shard(nn.Sequential(constant(nn.Linear(4, 4))), reproducible=2)
    frozen = nn.BatchNorm1d(4).eval()
    with pytest.raises(PlanError, match=r"if it stays in eval\(\), set its track_running_stats"):
        sw.fully_shard(nn.Sequential(nn.Linear(4, 4), frozen), reproducible=2)
    frozen.track_running_stats = False
    x, before = torch.randn(3, 4), [one.clone() for one in frozen.buffers()]
    expected = frozen(x)
    sharded_norm = sw.fully_shard(nn.Sequential(frozen), reproducible=2).eval()
    assert torch.equal(sharded_norm(x), expected)
    assert all(map(torch.equal, before, frozen.buffers()))
    with pytest.raises(PlanError, match="different sharding plans"):
        sw.fully_shard(nn.Linear(4, 4), reproducible=2 << dist.get_rank())
    with pytest.raises(PlanError, match=r"sw.leaves: the model has none"):
        sw.leaves(sw.fully_shard(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"2 values: expected 4, .* the 8 in a step"):
        sw.leaf_mean(_model(), [torch.ones(())] * 2)


@on_ranks(2)
def test_replicas_that_come_and_go_are_refused() -> None:
    model = _model()
    with pytest.raises(PlanError, match="which replicas take part in a step is not"):
        check_replica(model, optimizer_of(model, "adamw"), "sw.elastic")


def test_kernels_with_other_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"first call torch\.use_deterministic_algorithms"):
        api._check_deterministic(torch.device("cuda", 0), offloads=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.warns(UserWarning, match="with 2 threads per rank"):
        api._check_deterministic(torch.device("cpu"), offloads=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    api._check_deterministic(torch.device("cuda", 0), offloads=False)
    with pytest.warns(UserWarning, match="with 2 threads per rank"):
        api._check_deterministic(torch.device("cuda", 0), offloads=True)


@on_ranks(2)
def test_a_norm_of_scales_of_8_bit_states_is_refused() -> None:
    model = _model(granularity={"*.weight": "row"})
    optimizer = optimizer_of(model, "adam8bit")
    for leaf in sw.leaves(model):
        _backward(model, leaf)
    optimizer.step()
    scales = [state["exp_avg_scale"] for state in optimizer.state.values() if len(state) > 3]
    with pytest.raises(ShardedTensorError, match="cut inside a block of 1024 elements"):
        torch.linalg.vector_norm(scales[-1])


# -- random numbers --------------------------------------------------------------------------------


def test_random_numbers_depend_on_seed_step_and_micro_batch() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = set()
    for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (10, 1, 1), (1, 0, 11)):
        with sw.leaf_rng(*numbers):
            first = torch.rand(())
        with contextlib.suppress(OSError), sw.leaf_rng(*numbers):
            assert torch.equal(torch.rand(()), first)
            raise OSError
        drawn.add(first.item())
    assert len(drawn) == 7
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_dropout_matters() -> None:
    """So the other tests would notice masks that depend on the rank."""
    model = sharded(Options("gpt"))
    optimizer = optimizer_of(model, "adamw")
    with_dropout, _ = step_of(model, optimizer, 0)
    model = sharded(Options("gpt")).eval()
    without, _ = step_of(model, optimizer_of(model, "adamw"), 0)
    assert with_dropout != without
