"""Reductions of sharded tensors: norms, sums and extremes.

Every function here is a collective: all ranks of the mesh must call it.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise._private import foreach_norm
from shardwise.comm.api import RankGroup
from shardwise.comm.communicator import communicator
from shardwise.comm.tree import tree_sum
from shardwise.errors import StepError
from shardwise.plan.layout import Run
from shardwise.tensor.block_sums import Cuts, sums_in_blocks
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["across", "combine", "gather_runs", "norms", "sum_over_leaves"]


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
            total = sums_in_blocks([run], [cuts], mesh, gather_runs)[0].to(run[:0].sum().dtype)
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
    """Vector norms of tensors, with one exchange.

    Args:
        runs: this rank's parts of the tensors.
        mesh: the ranks.
        order: of the norm.
        cuts: the parts of all ranks, which a reproducible model needs.
    """
    if mesh.leaves is not None and math.isfinite(order):
        assert cuts is not None, "no tensor of a reproducible model is cut into chunks"
        return _norms_in_blocks(runs, mesh, order, cuts)
    local = _local_norms(runs, order)
    by_rank = across([norm.to(local[0].dtype) for norm in local], mesh)  # [ranks, tensors]
    # The norm of order 0 counts nonzero elements, so the ranks' counts add up.
    total = by_rank.sum(0) if order == 0 else torch.linalg.vector_norm(by_rank, order, dim=0)
    return [norm.to(own.dtype) for norm, own in zip(total.unbind(), local, strict=True)]


def _norms_in_blocks(
    runs: Sequence[Tensor], mesh: DataParallelMesh, order: float, cuts: Sequence[Cuts]
) -> list[Tensor]:
    real = [run.abs() if run.is_complex() else run for run in runs]
    totals = torch.stack(sums_in_blocks(real, cuts, mesh, gather_runs, _power_of(order)))
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


def sum_over_leaves(values: Sequence[Tensor], mesh: DataParallelMesh) -> Tensor:
    """Sum tensors [n] over all micro-batches of a step; ``values`` are those of this rank."""
    own = tree_sum(torch.stack(list(values)))
    return tree_sum(across(own.unbind(), mesh, mesh.in_order))


def across(
    values: Sequence[Tensor], mesh: DataParallelMesh, group: RankGroup | None = None
) -> Tensor:
    """Gather scalars of one dtype from the ranks of a replica, or of ``group``: [ranks, values]."""
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
