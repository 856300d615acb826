"""Reductions of sharded tensors: norms, sums and extremes.

Every public function here is a collective: all ranks of the mesh must call it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardwise._private import foreach_norm
from shardwise.comm.api import RankGroup
from shardwise.comm.communicator import communicator
from shardwise.comm.tree import tree_sum
from shardwise.errors import ShardedTensorError, StepError
from shardwise.plan.granularity import SUM_BLOCK
from shardwise.plan.layout import Run
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["across", "combine", "gather_runs", "norms", "sum_over_leaves"]


Cuts = tuple[Run, ...]  # the run of a parameter on each rank
# Blocks that are summed at once: on the CPU, as many as stay in the cache.
_ROWS_ON_CPU, _ROWS_ON_DEVICE = 1 << 8, 1 << 13


def combine(
    kind: str, run: Tensor, num_elements: int, mesh: DataParallelMesh, cuts: Cuts
) -> Tensor:
    """Reduce a tensor of ``num_elements``, of which this rank stores ``run``, to a scalar.

    ``kind`` is "sum", "mean", "max", "min", "all" or "any"; ``cuts`` are the runs of all ranks.
    """
    if kind in ("sum", "mean"):
        if mesh.leaves is None:
            total = across([run.sum()], mesh).sum()
        else:
            total = _sums_in_blocks([run], [cuts], mesh)[0].to(run[:0].sum().dtype)
        return total / num_elements if kind == "mean" else total
    if run.dtype is torch.bool or kind in ("all", "any"):
        # Sent as bytes, because not every backend sends booleans.
        kind = {"all": "min", "any": "max"}.get(kind, kind)
        return combine(kind, run.bool().to(torch.uint8), max(1, num_elements), mesh, cuts).bool()
    if not num_elements:
        raise ValueError(f"{kind} of a tensor without elements")
    pick, identity = (torch.amax, 0) if kind == "max" else (torch.amin, 1)
    value = pick(run) if run.numel() else run.new_full((), _bounds(run.dtype)[identity])
    extreme: Tensor = pick(across([value], mesh))
    return extreme


def norms(
    runs: Sequence[Tensor],
    mesh: DataParallelMesh,
    order: float,
    cuts: Sequence[Cuts] | None = None,
) -> list[Tensor]:
    """Vector norms of tensors, of which this rank has ``runs``, with one exchange.

    ``cuts`` are the parts of all ranks, which a reproducible model needs.
    """
    if mesh.leaves is not None and math.isfinite(order):
        assert cuts is not None, "no tensor of a reproducible model is cut into chunks"
        return _norms_in_blocks(runs, mesh, order, cuts)
    local = _local_norms(runs, order)
    by_rank = across(local, mesh)  # [ranks, tensors]
    # The norm of order 0 counts nonzero elements, so the ranks' counts add up.
    total = by_rank.sum(0) if order == 0 else torch.linalg.vector_norm(by_rank, order, dim=0)
    return [norm.to(own.dtype) for norm, own in zip(total.unbind(), local, strict=True)]


def _norms_in_blocks(
    runs: Sequence[Tensor], mesh: DataParallelMesh, order: float, cuts: Sequence[Cuts]
) -> list[Tensor]:
    real = [run.abs() if run.is_complex() else run for run in runs]
    totals = torch.stack(_sums_in_blocks(real, cuts, mesh, _power_of(order)))
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


def _sums_in_blocks(
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
    by_rank = gather_runs(own, [Run(0, n) for n in lengths], mesh, "sums of blocks")
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


def sum_over_leaves(values: Sequence[Tensor], mesh: DataParallelMesh) -> Tensor:
    """Sum tensors [n] over all micro-batches of a step; ``values`` are those of this rank."""
    own = tree_sum(torch.stack(list(values)))
    return tree_sum(across(own.unbind(), mesh, mesh.in_order))


def across(
    values: Sequence[Tensor], mesh: DataParallelMesh, group: RankGroup | None = None
) -> Tensor:
    """Gather scalars from the ranks of a replica, or of ``group``: [ranks, values].

    If their dtypes differ, they are promoted to one that holds all of them.
    """
    own = torch.stack(list(values))
    runs = [Run(0, own.numel())] * (mesh.shards if group is None else group).size
    return gather_runs(own, runs, mesh, "scalars", group)


def gather_runs(
    run: Tensor,
    runs: Sequence[Run],
    mesh: DataParallelMesh,
    what: str,
    group: RankGroup | None = None,
) -> Tensor:
    """Gather the 1-D ``run`` of each rank: [ranks, longest], padded with zeros.

    ``runs`` gives the lengths on all ranks.

    Raises:
        StepError: some ranks cannot take part, inside `sw.join`.
    """
    device = run.device
    if device.type == "cpu" and mesh.accelerator is not None:  # a shard in host memory
        run = run.to(mesh.accelerator)
    longest = max(len(other) for other in runs)
    with torch.inference_mode(mode=False):  # another thread writes to it
        gathered = run.new_zeros(len(runs), longest)
    group = mesh.shards if group is None else group
    comm = communicator(mesh.world, run.device)
    if comm.refusal:
        raise StepError(comm.refusal)
    comm.watch.recover()

    def fill() -> None:
        gathered[group.index, : run.numel()].copy_(run)

    label = f"gather {what}"
    comm.wait(comm.reduce.all_gather(gathered.view(-1), group, label, fill))
    return gathered.to(device)


def _local_norms(runs: Sequence[Tensor], order: float) -> list[Tensor]:
    filled = [run for run in runs if run.numel()]
    found = iter(foreach_norm(filled, order) if filled else ())
    # The norm of complex numbers is real, and all ranks must send the same dtype.
    of_empty = math.inf if order < 0 else 0.0
    return [
        next(found) if run.numel() else run.new_full((), of_empty, dtype=run.dtype.to_real())
        for run in runs
    ]


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    info = torch.iinfo(dtype)
    return info.min, info.max
