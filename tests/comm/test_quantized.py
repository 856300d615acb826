"""Quantized gathers and sums between real ranks, compared with their definition.

`tests/wire_reference.py` computes the rounding of each hop; results are bitwise equal.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.blockwise import Blocks
from shardwise.comm.api import Reduction, Stage
from shardwise.comm.communicator import Communicator, communicator
from shardwise.comm.device import copy_
from shardwise.comm.quantized import QuantizedSums, quantized_gather
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import DataParallelMesh, resolve_mesh
from tests import wire_reference
from tests.ranks import on_ranks

CPU = torch.device("cpu")
INT4 = Blocks("int4", 16)
SLOT = 1000  # elements; blocks do not divide it


def mesh_of(strategy: str) -> DataParallelMesh:
    row = PRESETS[strategy]
    return resolve_mesh(None, row, 2 if row.num_axes > 1 else None)


def communicator_of(mesh: DataParallelMesh) -> Communicator:
    comm = communicator(mesh.world, CPU)
    comm.watch.recover()  # an earlier test may have ended in an error
    return comm


def rounded(blocks: Blocks, rows: Tensor) -> Tensor:
    """Return ``rows`` [..., n] after quantization."""
    return wire_reference.rounded(blocks.format, blocks.size, rows)


def of_all_ranks(own: Tensor) -> Tensor:
    """Gather ``own`` [n] of each rank: [ranks, n]."""
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
    comm = communicator_of(mesh)
    size = len(flat) // mesh.size
    out = torch.empty(size)
    reduction = Reduction(flat, out, carried, out, mesh.reduction, scale)
    comm.wait(sums.reduce(comm.reduce, reduction, "reduce"))
    return out, mesh.reduction


def numbers(size: int) -> Tensor:
    torch.manual_seed(dist.get_rank())
    return torch.randn(size)


def added(rows: Tensor) -> Tensor:
    """Sum the ``rows`` in order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_every_rank_reads_the_same_slots(name: str) -> None:
    blocks, mesh = Blocks(name, 64), mesh_of("fsdp")
    comm, own = communicator_of(mesh), numbers(SLOT)
    flat = torch.empty(mesh.size * SLOT)
    slot = flat.view(mesh.size, -1)[mesh.rank]
    before = comm.gather.sent[1]
    comm.wait(
        quantized_gather(
            comm.gather, blocks, flat, mesh.shards, "gather", partial(copy_, slot, own)
        )
    )
    assert torch.equal(flat.view(mesh.size, -1), rounded(blocks, of_all_ranks(own)))
    assert comm.gather.sent[1] - before == blocks.num_bytes(SLOT) * (mesh.size - 1)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("blocks", [INT4, Blocks("int8", 256), Blocks("fp8", 64)], ids=str)
def test_a_sum_adds_rounded_addends(blocks: Blocks) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    flat = numbers(ranks * SLOT)
    out, _ = reduced("fsdp", flat, QuantizedSums(blocks, None, False), scale=0.5)
    addends = of_all_ranks(flat).view(ranks, ranks, SLOT)  # from, to
    if ranks > 1:  # a single rank sends nothing
        addends = rounded(blocks, addends)
    assert torch.equal(out, 0.5 * added(addends[:, rank]))


@on_ranks(4)
@pytest.mark.parametrize("blocks", [INT4, Blocks("int8", 256)], ids=str)
def test_hosts_quantize_their_sums_again(blocks: Blocks) -> None:
    """Figure 4 of ZeRO++, on 2 hosts of 2 ranks: slices are sent in the order of their owners."""
    hosts, near = 2, 2
    flat = numbers(4 * SLOT)
    out, _ = reduced("fsdp", flat, QuantizedSums(blocks, near, False))
    slots = of_all_ranks(flat).view(4, 4, SLOT)  # from, to
    arrived = []
    for other in range(hosts):
        # Within each host, this position sums the slots of the ranks at this position.
        place = dist.get_rank() % near
        row_of = [
            torch.cat([slots[other * near + sender, host * near + place] for host in range(hosts)])
            for sender in range(near)
        ]
        sums = added(rounded(blocks, torch.stack(row_of))).view(hosts, SLOT)
        # Then it sends each host its slot, quantized again.
        arrived.append(rounded(blocks, sums)[dist.get_rank() // near])
    assert torch.equal(out, added(torch.stack(arrived)))


@on_ranks(2, 3, 4)
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
def test_a_second_axis_reduces_the_sums_of_the_first(strategy: str) -> None:
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


@on_ranks(2, 4)
@pytest.mark.parametrize("has_hosts", [False, True])
def test_error_feedback_keeps_the_rounding_error(has_hosts: bool) -> None:
    """EF-SGD (arXiv 1901.09847): sent = C(gradient + residual); residual = that - sent."""
    ranks, near = dist.get_world_size(), 2 if has_hosts else None
    sums = QuantizedSums(INT4, near, error_feedback=True)
    residual = torch.zeros(ranks * SLOT)
    order = places_of(ranks, near)
    for step in range(4):
        flat = numbers(ranks * SLOT) * (step + 1)
        corrected = flat.view(ranks, SLOT)[order].flatten() + residual
        num_rows = min(ranks, near or ranks)
        residual = corrected - rounded(INT4, corrected.view(num_rows, -1)).flatten()
        reduced("fsdp", flat, sums)
        assert sums.residual is not None
        assert torch.equal(sums.residual.flatten(), residual)


def places_of(ranks: int, near: int | None) -> list[int]:
    """The slots in the order in which they are sent: grouped by position in the host."""
    near = min(ranks, near or ranks)
    return [rank for place in range(near) for rank in range(place, ranks, near)]


@on_ranks(2)
def test_error_feedback_reduces_the_error_of_the_mean() -> None:
    """The mean of many sums of the same numbers approaches them only with feedback."""
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


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "hosts"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_addend_spoils_one_sum_only(strategy: str, value: float) -> None:
    """Its whole block of the sum is NaN, and later sums are finite."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    near = 2 if strategy == "hosts" else None
    sums = QuantizedSums(INT4, near, error_feedback=True)
    is_cut = strategy != "ddp"
    flat = numbers(ranks * SLOT if is_cut else SLOT)
    place = SLOT + 5 if is_cut else 5  # in the slot of rank 1, or of all
    flat[place] = value if rank == ranks - 1 else flat[place]
    out, _ = reduced("fsdp" if is_cut else "ddp", flat, sums)
    if rank == 1 or not is_cut:
        assert out[:16].isnan().all()
    assert out[32:].isfinite().all()
    assert sums.residual is not None
    assert sums.residual.isfinite().all()
    again, _ = reduced("fsdp" if is_cut else "ddp", flat.nan_to_num(0, 0, 0), sums)
    assert again.isfinite().all()
