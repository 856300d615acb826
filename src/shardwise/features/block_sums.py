"""Sums and norms of the tensors of a reproducible model: the same bits on any number of ranks."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardwise.errors import ShardedTensorError
from shardwise.plan.granularity import SUM_BLOCK
from shardwise.plan.layout import Run
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import Cuts, InBlocks, gather_runs

__all__ = ["norms_in_blocks", "sums_in_blocks"]

# Blocks that are summed at once: on the CPU, as many as stay in the cache.
_ROWS_ON_CPU, _ROWS_ON_DEVICE = 1 << 8, 1 << 13


def norms_in_blocks(
    runs: Sequence[Tensor], cuts: Sequence[Cuts], mesh: DataParallelMesh, order: float
) -> list[Tensor]:
    """Vector norms of tensors of one dtype, of which this rank has ``runs``."""
    real = [run.abs() if run.is_complex() else run for run in runs]
    totals = torch.stack(sums_in_blocks(real, cuts, mesh, _power_of(order)))
    if order not in (0.0, 1.0):
        totals = totals.sqrt() if order == 2.0 else totals.pow(1 / order)  # noqa: PLR2004
    return list(totals.to(real[0].dtype).unbind())


def _power_of(order: float) -> Callable[[Tensor], object]:
    """The function that changes elements in place to the addends of a norm of ``order``."""
    if order == 2.0:  # noqa: PLR2004
        return lambda x: x.mul_(x)
    if order == 0.0:
        return lambda x: x.ne_(0)
    return lambda x: x.abs_() if order == 1.0 else x.abs_().pow_(order)


def sums_in_blocks(
    runs: Sequence[Tensor],
    cuts: Sequence[Cuts],
    mesh: DataParallelMesh,
    change: Callable[[Tensor], object] | None = None,
) -> list[Tensor]:
    """Sum tensors of one dtype, of which this rank has ``runs``, with one exchange.

    A reproducible model cuts parameters between blocks of `SUM_BLOCK` elements, counted from the
    first element of a parameter. Each block is on one rank, which adds its halves until one number
    is left. All ranks get the numbers of all blocks, and add those of a parameter in the same way,
    so the sums do not depend on the cuts. Additions are element by element, so they have the same
    bits in any kernel and at any place in a tensor::

        elements   0 1 2 3 | 4 5 6 7 | 8 9       three blocks of 4, the last one padded with zeros
        blocks     (0 + 2) + (1 + 3), ...
        parameter  (b0 + b2) + (b1 + 0)

    ``change`` changes elements in place before they are summed. The sums are scalars in the dtype
    of the tensors; at least float32, or int64.

    Raises:
        ShardedTensorError: a tensor is cut inside a block.
    """
    if any(len(run) and run.start % SUM_BLOCK for cut in cuts for run in cut):
        raise ShardedTensorError(
            f"a tensor of a reproducible model that is cut inside a block of {SUM_BLOCK} elements, "
            "such as scales of 8-bit states, has no sum or norm that is the same on any number of "
            "ranks; use .full_tensor()"
        )
    own = torch.cat(list(_block_sums(runs, change)))
    lengths = [sum(_num_blocks(cut[rank]) for cut in cuts) for rank in range(mesh.size)]
    by_rank = gather_runs(own, max(lengths), mesh, "sums of blocks")
    parts = _blocks_of_each(by_rank, cuts)
    sizes = [1 << max(0, sum(map(len, part)) - 1).bit_length() for part in parts]
    sums: dict[int, Tensor] = {}
    for size in set(sizes):  # tensors with about equally many blocks are summed together
        members = [index for index, other in enumerate(sizes) if other == size]
        rows = by_rank.new_zeros(len(members), size)
        for row, index in zip(rows, members, strict=True):
            if parts[index]:
                blocks = torch.cat(parts[index])
                row[: len(blocks)] = blocks
        sums.update(zip(members, _add_halves(rows).unbind(), strict=True))
    return [sums[index] for index in range(len(runs))]


def _block_sums(
    runs: Sequence[Tensor], change: Callable[[Tensor], object] | None
) -> Iterator[Tensor]:
    """Yield the sums of all blocks in order, some at a time."""
    first = runs[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    if not (first.is_floating_point() or first.is_complex()):
        dtype = torch.int64
    num_rows = _ROWS_ON_CPU if first.device.type == "cpu" else _ROWS_ON_DEVICE
    num_rows = min(num_rows, max(1, sum(-(-len(run) // SUM_BLOCK) for run in runs)))
    rows, filled = first.new_empty((num_rows, SUM_BLOCK), dtype=dtype), 0
    for piece in chain.from_iterable(torch.split(run, num_rows * SUM_BLOCK) for run in runs):
        num_blocks = -(-len(piece) // SUM_BLOCK)
        if filled + num_blocks > num_rows:
            yield _add_halves(rows[:filled])
            filled = 0
        flat = rows[filled : filled + num_blocks].view(-1)
        flat[len(piece) :] = 0
        values = flat[: len(piece)].copy_(piece)
        if change is not None:
            change(values)
        filled += num_blocks
    yield _add_halves(rows[:filled])


def _add_halves(rows: Tensor) -> Tensor:
    """Sum each of ``rows`` [n, 2**k], which it overwrites: [n]."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width] += rows[:, width : 2 * width]
    return rows[:, 0].clone()


def _blocks_of_each(by_rank: Tensor, cuts: Sequence[Cuts]) -> list[list[Tensor]]:
    """The parts of ``by_rank`` [ranks, blocks] that belong to each tensor, in order."""
    starts, found = [0] * len(by_rank), []
    for cut in cuts:
        parts = []
        for rank, run in enumerate(cut):
            start, starts[rank] = starts[rank], starts[rank] + _num_blocks(run)
            if len(run):
                parts.append(by_rank[rank, start : starts[rank]])
        found.append(parts)
    return found


def _num_blocks(run: Run) -> int:
    return -(-len(run) // SUM_BLOCK)


InBlocks.sums = staticmethod(sums_in_blocks)
InBlocks.norms = staticmethod(norms_in_blocks)
