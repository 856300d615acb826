"""Reductions of sharded tensors equal those of the whole, even if a rank has no elements."""

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

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
def test_reductions_with_an_index_or_over_some_dimensions_are_refused() -> None:
    pairs = _pairs()
    matrix, vector = pairs[0][0], pairs[1][0]
    for function, x in (
        (lambda x: x.max(dim=0), vector),
        (lambda x: x.min(dim=0, keepdim=True), vector),
        (lambda x: x.argmax(), vector),
        (lambda x: x.sum(dim=1), matrix),
        (lambda x: x.sum(dim=(1, 1)), matrix),
        (lambda x: torch._foreach_add([torch.ones(()).double()], [x]), vector),
        (lambda x: torch.amax(x, (0, 1), out=torch.zeros(()).double()), matrix),
        (lambda x: torch.max(x, out=torch.zeros(()).double()), matrix),
        (lambda x: x.view(torch.int64), matrix),
    ):
        with pytest.raises(sw.ShardedTensorError, match=r"full_tensor\(\)"):
            function(x)


@on_ranks(1, 3)
def test_extremes_of_two_tensors_are_those_of_their_elements() -> None:
    for sharded, whole in _pairs():
        for function in (torch.max, torch.min):
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    found = function(sharded, -sharded)
                    assert isinstance(found, sw.ShardedTensor)
                    _assert_same(found.full_tensor(), function(whole, -whole))


@on_ranks(1, 3)
def test_numbers_of_chunks_are_those_of_the_whole() -> None:
    """An optimizer takes them to Python, or branches on them, in the same way on all ranks."""
    whole = nn.ParameterList(torch.randn(shape).double().sub(0.4) for shape in SHAPES if shape)
    chunked = nn.ParameterList(p.detach().clone() for p in whole)
    sw.fully_shard(nn.Sequential(chunked), granularity="dim")
    functions: list[Callable[[Tensor], Tensor]] = [
        *(Tensor.sum, Tensor.mean, Tensor.norm, lambda x: x.norm(1)),
        *(lambda x: -(x * x).sum() / 3, lambda x: (x > 0).sum()),
        *(lambda x: (x > 1).any(), lambda x: (x > -1).all()),
    ]
    extremes: list[Callable[[Tensor], Tensor]] = [Tensor.max, Tensor.amin, lambda x: -x.max()]
    for sharded, expected in zip(chunked, whole, strict=True):
        has_empty_chunk = len(expected) < 3  # of which torch takes no extreme
        for x in (sharded.detach(), sharded.data * 1):
            for function in functions if has_empty_chunk else functions + extremes:
                want = function(expected)
                assert function(x).item() == pytest.approx(want.item(), rel=1e-12)
                assert float(function(x)) == pytest.approx(float(want), rel=1e-12)
                assert bool(function(x)) == bool(want)
    assert chunked[2].detach().item() == whole[2].item(), "of a tensor that only one rank has"


@on_ranks(2)
def test_numbers_on_other_meshes_are_those_of_torch() -> None:
    """Other parts of a program may rely on them."""
    sw.fully_shard(nn.Sequential(nn.Linear(4, 4)), granularity="dim")
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    part = DTensor.from_local(torch.tensor(float(dist.get_rank())), other, [Partial()])
    assert part.item() == dist.get_rank()
    assert part.full_tensor().item() == 1.0
