"""Muon on any number of ranks equals Muon in one process, which equals `torch.optim.Muon`."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.communicator import communicator
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.optim import ownership
from tests.covering import covered_first
from tests.models import CASES, Gpt, GptBlock, build
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import (
    assert_equal_training,
    comm_of,
    options_of,
    own_part,
    runtime_of,
)

STRATEGIES = ("fsdp", "zero2", "zero1", "ddp", "hsdp", "hfsdp")
GRANULARITIES = ("element", "row", "tensor", "dim")
MODELS = ("stack", "gpt", "conv", "unused and reused", "tied", "lora", "tiny")


def muon(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """Muon for matrices, otherwise AdamW. A large eps, as gradients may be rounding errors."""
    return sw.optim.Muon(matrix_groups(parameters), lr=1e-2, eps=1e-3, adamw_eps=1e-3)


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size", "granularity", "name"),
    covered_first(
        (
            (strategy, size, granularity, name)
            for strategy in STRATEGIES
            for size in ((4, 2) if strategy.startswith("h") else (4, 3, 2, 1))
            for granularity in GRANULARITIES
            for name in MODELS
            if (strategy, granularity) != ("hfsdp", "dim")
        ),
    ),
)
def test_steps_are_those_of_one_process(strategy: str, granularity: str, name: str) -> None:
    options = {**options_of(strategy), "granularity": granularity}
    assert_equal_training(name, steps=3, make_optimizer=muon, **options)


def test_one_rank_steps_tall_matrices() -> None:
    """Updates of tall matrices are transposed views."""
    assert_equal_training("stack", steps=2, make_optimizer=muon)


def test_one_process_steps_like_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, without the cast to bfloat16 in torch's orthogonalization."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    for options in ({}, {"nesterov": False, "weight_decay": 0.3}, {"momentum": 0.5, "ns_steps": 3}):
        for adjust in (None, "original", "match_rms_adamw"):
            torch.manual_seed(0)
            shapes = (4, 9), (9, 4), (5, 5)
            ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
            theirs = [nn.Parameter(p.detach().clone()) for p in ours]
            kinds: Any = (sw.optim.Muon, ours), (torch.optim.Muon, theirs)
            optimizers = [kind(p, adjust_lr_fn=adjust, **options) for kind, p in kinds]
            for _ in range(4):
                for one, other in zip(ours, theirs, strict=True):
                    one.grad = torch.randn_like(one)
                    other.grad = one.grad.clone()
                for optimizer in optimizers:
                    optimizer.step()
            for one, other in zip(ours, theirs, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-10)


def _step_of(name: str, granularity: Any, strategy: str, batch_bytes: int) -> dict[str, Any]:
    """The work and messages of a step of Muon on this rank."""
    ownership.BATCH_BYTES = batch_bytes
    model, case = build(name), CASES[name]
    sw.fully_shard(model, units=case.units, granularity=granularity, **options_of(strategy))
    optimizer = muon(iter(model.parameters()))
    assert isinstance(optimizer, sw.optim.Muon)
    worked: list[str] = []
    work = optimizer._work

    def counted(member: Any, *args: Any) -> Tensor:
        worked.extend([member.matrices.name] * member.matrices.num_matrices)
        return work(member, *args)

    optimizer._work = counted  # type: ignore[method-assign,assignment]
    comm = comm_of(model)
    sent = []
    for _ in range(2):
        worked.clear()
        case.loss(model(own_part(case.batch(12)))).backward()  # type: ignore[no-untyped-call]
        before = [queue.sent for queue in (comm.gather, comm.reduce)]
        optimizer.step()
        after = [queue.sent for queue in (comm.gather, comm.reduce)]
        sent.append(
            tuple(sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
        )
        optimizer.zero_grad()
    ownership.BATCH_BYTES = 1 << 24
    return {
        "worked": worked,
        "sent": sent,
        "planned": optimizer.sent_bytes().total,
        "of others": [optimizer.sent_bytes(rank).total for rank in range(comm.num_ranks)],
        "owners": optimizer.owners(),
        "matrices": [m.matrices for e in optimizer._plan() for m in e.members],
    }


@pytest.mark.parametrize(
    ("ranks", "strategy", "granularity", "batch_bytes"),
    [
        (2, "fsdp", "element", 1 << 24),
        (4, "hsdp", "row", 1),
        (3, "ddp", "element", 600),
        (4, "fsdp", "tensor", 1),
        (4, "hfsdp", "element", 600),
        (3, "fsdp", "dim", 600),
    ],
)
def test_each_matrix_has_one_owner_and_the_bytes_are_those_of_the_plan(
    ranks: int, strategy: str, granularity: Any, batch_bytes: int
) -> None:
    by_rank = run_on(ranks, _step_of, "gpt", granularity, strategy, batch_bytes)
    done = Counter(name for one in by_rank for name in one["worked"])
    assert done == {matrices.name: 1 for matrices in by_rank[0]["matrices"]}, (
        "once on all ranks together"
    )
    for rank, one in enumerate(by_rank):
        assert one["owners"] == by_rank[0]["owners"]
        assert sorted(one["worked"]) == sorted(
            name for name, owner in one["owners"].items() if owner == rank
        )
        assert {num_bytes for _, num_bytes in one["sent"]} == {one["planned"]}
        assert one["planned"] == by_rank[0]["of others"][rank]
    total = sum(one["planned"] for one in by_rank)
    assert (total == 0) == (granularity == "tensor"), "whole matrices need not be sent"
    batches = by_rank[0]["sent"][0][0]
    assert batches > 2 if batch_bytes < 1000 and total else batches in (0, 2)


@on_ranks(2, 3)
def test_ranks_are_notified_of_an_exception_on_an_owner(world_size: int) -> None:
    model, case = build("stack"), CASES["stack"]
    sw.fully_shard(model, units=case.units)
    optimizer = muon(iter(model.parameters()))
    assert isinstance(optimizer, sw.optim.Muon)
    work, own = optimizer._work, torch.distributed.get_rank()

    def backward() -> None:
        case.loss(model(own_part(case.batch(12)))).backward()  # type: ignore[no-untyped-call]

    def step_and_go_on() -> None:  # a rank that exchanges nothing with the owner notices later
        optimizer.step()
        model(own_part(case.batch(12)))

    def fail(*_args: Any) -> Tensor:
        raise ValueError("it hurts")

    backward()
    torch.distributed.barrier()  # otherwise it could end the backward of a rank that is late
    if own == world_size - 1:
        optimizer._work = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(ValueError, match="it hurts"):
            optimizer.step()
        optimizer._work = work  # type: ignore[method-assign]
    else:
        with pytest.raises(sw.PeerAborted, match=rf"rank {world_size - 1} gave up.*it hurts"):
            step_and_go_on()
    optimizer.zero_grad()
    backward()
    optimizer.step()


@on_ranks(2)
def test_ranks_that_step_different_matrices_raise() -> None:
    model, case = build("stack"), CASES["stack"]
    sw.fully_shard(model, units=case.units)
    optimizer = muon(iter(model.parameters()))
    case.loss(model(own_part(case.batch(12)))).backward()  # type: ignore[no-untyped-call]
    if torch.distributed.get_rank():
        for parameter in model.parameters():
            parameter.grad = None

    def step_and_go_on() -> None:
        optimizer.step()
        model(own_part(case.batch(12)))

    with pytest.raises(sw.RanksDiverged, match="collect Muon, batch 1 of 1"):
        step_and_go_on()


def test_parameters_that_are_not_matrices_are_refused() -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 3))
    with pytest.raises(sw.PlanError, match=r"param_groups\[0\]\['params'\]\[1\].*method=\"adamw\""):
        sw.optim.Muon([matrix, vector])
    with pytest.raises(sw.PlanError, match="split=3 does not divide its 4 outputs"):
        sw.optim.Muon([{"params": [matrix], "split": 3}])
    with pytest.raises(sw.PlanError, match="no complex"):
        sw.optim.Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.raises(sw.PlanError, match="method='soap'"):
        sw.optim.Muon([{"params": [matrix], "method": "soap"}])


def test_options_define_the_matrices_of_a_parameter() -> None:
    """Fused, stacked, transposed and convolutional weights are stepped like their matrices."""

    def step(value: Tensor, gradient: Tensor, **options: Any) -> Tensor:
        parameter = nn.Parameter(value.clone())
        parameter.grad = gradient.clone()
        sw.optim.Muon([{"params": [parameter], **options}], lr=0.1).step()
        return parameter.detach()

    torch.manual_seed(0)
    value, gradient = torch.randn(2, 12, 4, dtype=torch.float64).unbind()
    parts = [
        step(v, g) for v, g in zip(*(torch.split(x, 4) for x in (value, gradient)), strict=True)
    ]
    assert torch.allclose(step(value, gradient, split=3), torch.cat(parts))
    stacks = value.view(3, 4, 4), gradient.view(3, 4, 4)
    assert torch.allclose(step(*stacks), torch.stack(parts))
    assert torch.allclose(
        step(*stacks, stacked=False).flatten(1), step(value.view(3, 16), gradient.view(3, 16))
    )
    across = step(value.T.contiguous(), gradient.T.contiguous(), split=3, transposed=True)
    assert torch.allclose(across.T, torch.cat(parts))
    sizes = (8, 2, 2)
    unequal = [
        step(v, g)
        for v, g in zip(*(torch.split(x, list(sizes)) for x in (value, gradient)), strict=True)
    ]
    assert torch.allclose(step(value, gradient, split=sizes), torch.cat(unequal))
    images = value.view(12, 1, 2, 2), gradient.view(12, 1, 2, 2)
    assert torch.allclose(step(*images).view(12, 4), step(value, gradient))


def _bytes_of_steps(granularity: Any, strategy: str) -> list[int]:
    """The bytes that this rank sends in a step of AdamW and of Muon, equal to the prediction."""
    sent = []
    for name in ("adamw", "muon"):
        torch.manual_seed(0)
        model = Gpt(vocabulary=64, width=32)
        sw.fully_shard(model, units=GptBlock, granularity=granularity, **options_of(strategy))
        runtime = runtime_of(model)
        comm = communicator(runtime.mesh.world, runtime.pools.device)
        planned = sent_bytes(runtime.plan)
        if name == "muon":
            optimizer: Any = sw.optim.Muon(sw.optim.parameter_groups(model))
            planned += optimizer.sent_bytes()
        else:
            optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            before = [queue.sent[1] for queue in (comm.gather, comm.reduce)]
            model(torch.randint(64, (2, 16))).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = [queue.sent[1] for queue in (comm.gather, comm.reduce)]
        sent.append(sum(after) - sum(before))
        assert sw.ledger(model).sent_bytes() == planned, "on each axis"
        assert sent[-1] == planned.total
    return sent


@pytest.mark.parametrize(
    ("strategy", "granularity", "limit"),
    [
        ("fsdp", "element", 1.1),
        ("fsdp", "tensor", 1.0),
        ("hsdp", "element", 1.4),
        pytest.param("zero2", "element", 1.1, marks=pytest.mark.thorough),
        pytest.param("hfsdp", "element", 1.4, marks=pytest.mark.thorough),
    ],
)
def test_a_step_sends_little_more_than_a_step_of_adamw(
    strategy: str, granularity: Any, limit: float
) -> None:
    by_rank = run_on(4, _bytes_of_steps, granularity, strategy)
    adamw, of_muon = (sum(sent[i] for sent in by_rank) for i in (0, 1))
    assert of_muon <= limit * adamw, of_muon / adamw
