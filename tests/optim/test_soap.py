"""SOAP on any number of ranks equals SOAP in one process, which equals a public implementation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.tensor.sharding import local_of, sharding_of
from tests.covering import covered_first
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_equal_models,
    assert_equal_training,
    options_of,
    sharded_pair,
)

STRATEGIES = ("fsdp", "zero2", "zero1", "ddp", "hsdp", "hfsdp")


def soap(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """SOAP for matrices, otherwise AdamW. A large eps, as gradients may be rounding errors."""
    groups = matrix_groups(parameters)
    return sw.optim.SOAP(groups, eps=1e-3, adamw_eps=1e-3, precondition_frequency=2, damping=1e-3)


ROWS = covered_first(
    (strategy, size, granularity, name)
    for strategy in STRATEGIES
    for size in ((4, 2) if strategy.startswith("h") else (4, 3, 2, 1))
    for granularity in ("element", "row", "tensor", "dim")
    for name in ("stack", "gpt", "conv", "unused and reused", "tied", "tiny")
    if (strategy, granularity) != ("hfsdp", "dim")
)


@on_ranks()
@pytest.mark.parametrize(("strategy", "world_size", "granularity", "name"), ROWS)
def test_steps_are_those_of_one_process(strategy: str, granularity: str, name: str) -> None:
    options = {**options_of(strategy), "granularity": granularity}
    assert_equal_training(name, steps=5, make_optimizer=soap, **options)


@on_ranks(3, thorough=(1, 2, 4))
def test_the_same_gradients_give_the_same_bits() -> None:
    """Also for gradients of low rank, whose basis is rounding errors."""
    reference, model = sharded_pair("stack")
    optimizers = []
    for one in (reference, model):
        groups = matrix_groups(one.parameters())
        optimizers.append(sw.optim.SOAP(groups, precondition_frequency=1, damping=0))
    for seed in range(4):
        torch.manual_seed(seed)
        for parameter, other in zip(reference.parameters(), model.parameters(), strict=True):
            shape = parameter.shape
            rank_one = torch.randn(shape[0], 1).double() * torch.randn(1, *shape[1:]).double()
            parameter.grad = rank_one.view(shape) if len(shape) > 1 else torch.randn(shape).double()
            sharding = sharding_of(other)
            assert sharding is not None
            other.grad = torch.zeros_like(other)
            local_of(other.grad).copy_(sharding.own_part_of(parameter.grad))
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_models(model, reference, 4)


@pytest.mark.parametrize(
    "options", [{}, {"precondition_frequency": 1}, {"max_precondition_dim": 6}]
)
def test_one_process_steps_like_a_public_implementation(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("pytorch_optimizer.optimizer.soap", reason="the oracle")
    # Their implementation casts to float32 before the QR decomposition.
    monkeypatch.setattr(theirs, "torch", _Torch())
    torch.manual_seed(0)
    # Sides with a basis have full rank; otherwise, part of the basis would be rounding errors.
    shapes = ((4, 9), (9, 4), (5, 5)) if "max_precondition_dim" in options else ((4, 4), (7, 7))
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    others = [nn.Parameter(p.detach().clone()) for p in ours]
    both = {"lr": 0.01, "weight_decay": 0.0, "precondition_frequency": 3, **options}
    optimizer = sw.optim.SOAP(ours, **both, damping=0)
    other = theirs.SOAP(others, **both)
    for _ in range(8):
        for one, twin in zip(ours, others, strict=True):
            one.grad = torch.randn_like(one)
            twin.grad = one.grad.clone()
        optimizer.step()
        other.step()
    for one, twin in zip(ours, others, strict=True):
        assert torch.allclose(one, twin, rtol=0, atol=1e-10)


def test_the_first_step_changes_no_matrix() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(4, 4))
    optimizer = sw.optim.SOAP([matrix], weight_decay=0.5)
    matrix.grad = torch.randn(4, 4)
    before = matrix.detach().clone()
    optimizer.step()
    assert torch.equal(matrix, before)
    optimizer.step()
    assert not torch.equal(matrix, before)


class _Torch:
    """`torch` with float64 in place of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
