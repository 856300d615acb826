"""Quantized gathers and sums between real ranks, against their definition on all ranks' numbers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.blockwise import Blocks
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import DataParallelMesh, resolve_mesh
from shardwise.transport.api import Reduction, Stage
from shardwise.transport.communicator import communicator
from shardwise.transport.device import copy_
from shardwise.transport.quantized import QuantizedSums, quantized_gather
from tests.ranks import on_ranks

CPU = torch.device("cpu")
INT4 = Blocks("int4", 16)
SLOT = 1000  # elements; blocks do not divide it


def mesh_of(strategy: str) -> DataParallelMesh:
    row = PRESETS[strategy]
    return resolve_mesh(None, row, 2 if row.num_axes > 1 else None)


def rounded(blocks: Blocks, rows: Tensor) -> Tensor:
    """What ranks read of ``rows`` [..., n]."""
    encoded = torch.empty(*rows.shape[:-1], blocks.num_bytes(rows.shape[-1]), dtype=torch.uint8)
    blocks.encode(rows, encoded)
    result = torch.empty(rows.shape)
    blocks.decode(encoded, result)
    return result


def of_all_ranks(own: Tensor) -> Tensor:
    """[ranks, n]"""
    ranks = dist.get_world_size()
    gathered = own.new_empty(ranks * len(own))
    dist.all_gather_into_tensor(gathered, own)
    return gathered.view(ranks, -1)


def reduced(
    strategy: str,
    flat: Tensor,
    sums: QuantizedSums,
    carried: Tensor | None = None,
    scale: float = 1,
) -> tuple[Tensor, tuple[Stage, ...]]:
    mesh = mesh_of(strategy)
    links = communicator(mesh.world, CPU)
    size = len(flat) // mesh.size
    out = torch.empty(size)
    reduction = Reduction(flat, out, carried, out, mesh.reduction, scale)
    links.wait(sums.reduce(links.reduce, reduction, "reduce"))
    return out, mesh.reduction


def numbers(size: int) -> Tensor:
    torch.manual_seed(dist.get_rank())
    return torch.randn(size)


def added(rows: Tensor) -> Tensor:
    """The sum of ``rows``, one after the other."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_every_rank_reads_the_same_slots(name: str) -> None:
    blocks, mesh = Blocks(name, 64), mesh_of("fsdp")
    links, own = communicator(mesh.world, CPU), numbers(SLOT)
    flat = torch.empty(mesh.size * SLOT)
    slot = flat.view(mesh.size, -1)[mesh.rank]
    before = links.gather.sent[1]
    links.wait(
        quantized_gather(
            links.gather, blocks, flat, mesh.shards, "gather", partial(copy_, slot, own)
        )
    )
    assert torch.equal(flat.view(mesh.size, -1), rounded(blocks, of_all_ranks(own)))
    assert links.gather.sent[1] - before == blocks.num_bytes(SLOT) * (mesh.size - 1)


@on_ranks(2, 4)
def test_a_sum_is_that_of_rounded_addends() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    flat = numbers(ranks * SLOT)
    out, _ = reduced("fsdp", flat, QuantizedSums(INT4, None, False), scale=0.5)
    addends = rounded(INT4, of_all_ranks(flat).view(ranks, ranks, SLOT))  # from, to
    assert torch.equal(out, 0.5 * added(addends[:, rank]))


@on_ranks(4)
def test_hosts_send_sums_that_are_quantized_anew() -> None:
    rank, near = dist.get_rank(), 2
    flat = numbers(4 * SLOT)
    out, _ = reduced("fsdp", flat, QuantizedSums(INT4, near, False))
    slots = of_all_ranks(flat).view(2, near, 2, near, SLOT)  # from host, from place, to, to
    # Those for the same place in all hosts go together.
    first = rounded(INT4, slots.permute(0, 1, 3, 2, 4).reshape(2, near, near, 2 * SLOT))
    sums = torch.stack([added(host) for host in first]).view(2, near, 2, SLOT)
    second = rounded(INT4, sums[:, rank % near, rank // near])
    assert torch.equal(out, added(second))


@on_ranks(2, 3)
def test_all_ranks_have_the_same_bits_after_an_all_reduce() -> None:
    ranks = dist.get_world_size()
    flat = numbers(SLOT + 1)
    carried = torch.full((SLOT + 1,), 0.25 * (dist.get_rank() + 1))
    out, _ = reduced("ddp", flat, QuantizedSums(INT4, None, False), carried)
    slot = -(-len(flat) // ranks)
    addends = torch.zeros(ranks, ranks * slot)
    addends[:, : len(flat)] = of_all_ranks(flat + carried)
    sums = added(rounded(INT4, addends.view(ranks, ranks, slot)))
    assert torch.equal(out, rounded(INT4, sums).flatten()[: len(flat)])


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_a_second_axis_gets_sums(strategy: str) -> None:
    flat = numbers(4 * SLOT)
    carried = torch.full((2 * SLOT,), 0.25)
    out, stages = reduced(strategy, flat, QuantizedSums(INT4, None, False), carried)
    row, column = (stage.group for stage in stages)
    addends = rounded(INT4, of_all_ranks(flat).view(4, 2, -1))
    sums = {rank: added(addends[[rank // 2 * 2, rank // 2 * 2 + 1], rank % 2]) for rank in range(4)}
    mine = torch.stack([sums[rank] + 0.25 for rank in column.ranks])
    again = added(rounded(INT4, mine.view(2, 2, SLOT)))  # a slot for each rank of the column
    if strategy == "hfsdp":
        assert torch.equal(out, again[column.index])
    else:
        assert torch.equal(out, rounded(INT4, again).flatten())
    assert row.ranks == ((0, 1), (2, 3))[dist.get_rank() // 2]


@on_ranks(2)
def test_what_rounding_takes_comes_back() -> None:
    """The mean of many sums of the same numbers comes near them; without feedback it does not."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    flat = numbers(ranks * SLOT)
    exact = of_all_ranks(flat).view(ranks, ranks, SLOT).sum(0)[rank]
    errors = []
    for has_feedback in (False, True):
        sums = QuantizedSums(INT4, None, has_feedback)
        results = [reduced("fsdp", flat, sums)[0] for _ in range(32)]
        errors.append((torch.stack(results).mean(0) - exact).norm().item())
    assert errors[1] < errors[0] / 8
    assert sums.residual is not None
    flat[3] = torch.inf
    reduced("fsdp", flat, sums)
    assert sums.residual.isfinite().all()
