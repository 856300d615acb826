"""Reductions of sharded tensors equal those of the whole, even if a rank has no elements."""

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.ranks import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(5, 3), (7,), (), (1,), (2, 3, 4)]
ORDERS = [0, 0.5, 1, 2, 3, -1, -2, math.inf, -math.inf]


def _pairs() -> list[tuple[Tensor, Tensor]]:
    """Sharded tensors and the whole ones. With three ranks, some hold no part of the small ones."""
    whole = nn.ParameterList(torch.randn(shape).double().sub(0.4) for shape in SHAPES)
    with torch.no_grad():
        whole[1][2] = 0.0
    sharded = nn.ParameterList(p.detach().clone() for p in whole)
    sw.fully_shard(nn.Sequential(sharded))
    return [(p.detach(), q.detach()) for p, q in zip(sharded, whole, strict=True)]


def _assert_same(found: Tensor, expected: Tensor) -> None:
    assert not isinstance(found, sw.ShardedTensor)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@on_ranks(1, 3)
def test_norms_of_every_order() -> None:
    shards, wholes = zip(*_pairs(), strict=True)
    for order in ORDERS:
        together = torch._foreach_norm(shards, order)
        for norm, sharded, whole in zip(together, shards, wholes, strict=True):
            expected = torch.linalg.vector_norm(whole, order)
            _assert_same(sharded.norm(order), expected)
            _assert_same(norm, expected)


@on_ranks(1, 3)
def test_keepdim_keeps_the_dimensions() -> None:
    functions: list[Callable[..., Tensor]] = [torch.sum, torch.mean, torch.amax, torch.amin]
    for sharded, whole in _pairs():
        dims = tuple(range(whole.ndim))
        for function in functions:
            _assert_same(function(sharded, dims, True), function(whole, dims, True))
        for kind in (torch.all, torch.any):
            found = kind(sharded > 0, dims, True) if dims else kind(sharded > 0)
            expected = kind(whole > 0, dims, True) if dims else kind(whole > 0)
            _assert_same(found, expected)
        norm = torch.linalg.vector_norm(sharded, 2, dims, keepdim=True)
        _assert_same(norm, torch.linalg.vector_norm(whole, 2, dims, keepdim=True))
        scaled = sharded / norm
        assert isinstance(scaled, sw.ShardedTensor)
        _assert_same(scaled.full_tensor(), whole / whole.norm())


@on_ranks(1, 3)
def test_extremes_of_lists_and_of_booleans() -> None:
    shards, wholes = zip(*_pairs(), strict=True)
    for found, whole in zip(torch._foreach_max(shards), wholes, strict=True):
        _assert_same(found, whole.max())
    for sharded, whole in zip(shards, wholes, strict=True):
        _assert_same((sharded > 0).max(), (whole > 0).max())
        _assert_same((sharded > 0).min(), (whole > 0).min())


@on_ranks(1, 3)
def test_comparisons() -> None:
    for sharded, whole in _pairs():
        other = sharded.clone()
        for one in (other, whole):
            assert torch.equal(sharded, one)
            assert torch.allclose(sharded, one)
        other.mul_(1.0 + 1e-7)
        assert not torch.equal(sharded, other)
        assert sharded.allclose(other)
        assert not sharded.allclose(other, rtol=0.0, atol=0.0)
        assert not torch.equal(sharded, torch.zeros(9, dtype=torch.float64))


@on_ranks(2)
def test_reductions_with_an_index_or_an_output_are_refused() -> None:
    pairs = _pairs()
    matrix, vector = pairs[0][0], pairs[1][0]
    for function, x in (
        (lambda x: x.max(dim=0), vector),
        (lambda x: x.min(dim=0, keepdim=True), vector),
        (lambda x: x.argmax(), vector),
        (lambda x: torch._foreach_add([torch.ones(()).double()], [x]), vector),
        (lambda x: torch.amax(x, (0, 1), out=torch.zeros(()).double()), matrix),
        (lambda x: torch.max(x, out=torch.zeros(()).double()), matrix),
        (lambda x: x.view(torch.int64), matrix),
    ):
        with pytest.raises(sw.ShardedTensorError, match=r"full_tensor\(\)"):
            function(x)
    for dim, error in (((1, 1), RuntimeError), (2, IndexError)):
        with pytest.raises(error, match=r"[Dd]im"):
            matrix.sum(dim=dim)


@on_ranks(1, 3)
def test_extremes_of_two_tensors_are_those_of_their_elements() -> None:
    for sharded, whole in _pairs():
        for function in (torch.max, torch.min):
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    found = function(sharded, -sharded)
                    assert isinstance(found, sw.ShardedTensor)
                    _assert_same(found.full_tensor(), function(whole, -whole))
