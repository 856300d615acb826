"""Reductions of sharded tensors: norms, sums and extremes.

Every public function here is a collective: all ranks of the mesh must call it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardwise._private import foreach_norm
from shardwise.comm.api import RankGroup
from shardwise.comm.communicator import communicator
from shardwise.errors import StepError
from shardwise.plan.layout import Run
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["InBlocks", "OverDims", "across", "combine", "gather_runs", "norms", "rows_of"]


Cuts = tuple[Run, ...]  # the run of a parameter on each rank


class InBlocks:
    """Sums and norms of tensors of a reproducible model; `features.block_sums` sets them."""

    sums: ClassVar[Callable[[Sequence[Tensor], Sequence[Cuts], DataParallelMesh], list[Tensor]]]
    norms: ClassVar[Callable[..., list[Tensor]]]


def combine(
    kind: str, run: Tensor, num_elements: int, mesh: DataParallelMesh, cuts: Cuts
) -> Tensor:
    """Reduce a tensor of ``num_elements``, of which this rank stores ``run``, to a scalar.

    Its dtype may be a wider one, in which elements are summed. ``kind`` is "sum", "mean", "max",
    "min", "all" or "any"; ``cuts`` are the runs of all ranks.
    """
    if kind in ("sum", "mean"):
        if mesh.leaves is None:  # of 16-bit elements in float32, as torch sums them
            exact = torch.promote_types(run.dtype, torch.float32)
            total = across([run.sum(dtype=exact if run.is_floating_point() else None)], mesh).sum()
        else:
            total = InBlocks.sums([run], [cuts], mesh)[0]
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
        return InBlocks.norms(runs, cuts, mesh, order)
    local = _local_norms(runs, order)
    by_rank = across(local, mesh)  # [ranks, tensors]
    # The norm of order 0 counts nonzero elements, so the ranks' counts add up.
    total = by_rank.sum(0) if order == 0 else torch.linalg.vector_norm(by_rank, order, dim=0)
    return [norm.to(own.dtype) for norm, own in zip(total.unbind(), local, strict=True)]


# For a kind: reduces dims of a tensor, and adds the results of two ranks.
_OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sum": (torch.sum, torch.add),
    "max": (torch.amax, torch.maximum),
    "min": (torch.amin, torch.minimum),
}


@dataclass(frozen=True)
class OverDims:
    """Reductions over some ``dims`` of a tensor of ``shape``, of which each rank stores a run."""

    dims: Collection[int]
    shape: Sequence[int]
    runs: Cuts  # of all ranks
    mesh: DataParallelMesh

    def reduce(self, kind: str, run: Tensor, order: float = 2.0) -> Tensor:
        """Reduce the tensor of which this rank stores ``run``; every rank gets the whole result.

        ``kind`` is one of `combine` or "norm", of order ``order``. In the result, ``dims`` have
        size 1. It may have a wider dtype than the tensor.
        """
        if kind in ("all", "any") or run.dtype is torch.bool:
            # Sent as bytes, because not every backend sends booleans.
            run, kind = run.bool().to(torch.uint8), {"all": "min", "any": "max"}.get(kind, kind)
        if kind in ("max", "min"):
            return self._reduce_rows(kind, run)
        if not (run.is_floating_point() or run.is_complex()):
            return self._reduce_rows(kind, run.long())
        exact = run.to(torch.promote_types(run.dtype, torch.float32))
        if kind == "norm":
            return self._norm(exact.abs(), order)
        total = self._reduce_rows("sum", exact)
        return total / math.prod(self.shape[dim] for dim in self.dims) if kind == "mean" else total

    def _norm(self, size: Tensor, order: float) -> Tensor:
        if math.isinf(order):
            return self._reduce_rows("max" if order > 0 else "min", size)
        if order == 0:
            return self._reduce_rows("sum", (size != 0).to(size.dtype))
        return self._reduce_rows("sum", size.pow(order)).pow(1 / order)

    def _reduce_rows(self, kind: str, run: Tensor) -> Tensor:
        """A sum or an extreme: each rank reduces the rows of which it has elements."""
        reduce, add = _OPERATORS[kind]
        # What the first and the last of these rows are filled up with: others have the rest.
        neutral = 0.0 if kind == "sum" else _bounds(run.dtype)[kind == "min"]
        width = math.prod(self.shape[1:])
        spans = [rows_of(its_run, width) for its_run in self.runs]
        own, span = self.runs[self.mesh.rank], spans[self.mesh.rank]
        rows = run.new_full((len(span) * width,), neutral)
        start = own.start - span.start * width
        rows[start : start + len(own)] = run
        part = reduce(rows.view(len(span), *self.shape[1:]), dim=tuple(self.dims), keepdim=True)
        shape = [1 if dim in self.dims else size for dim, size in enumerate(self.shape)]
        result = part.new_full(shape, neutral)
        longest = part[0].numel() * (1 if 0 in self.dims else max(map(len, spans)))
        parts = gather_runs(part.view(-1), longest, self.mesh, "parts of a reduction")
        for span, its_part in zip(spans, parts, strict=True):
            target = result if 0 in self.dims else result[span.start : span.stop]
            add(target, its_part[: target.numel()].view_as(target), out=target)
        return result


def rows_of(run: Run, width: int) -> range:
    """The rows, each of ``width`` elements, that ``run`` has elements of; row 0 if it is empty."""
    return range(run.start // width, -(-run.stop // width)) if len(run) else range(1)


def across(
    values: Sequence[Tensor], mesh: DataParallelMesh, group: RankGroup | None = None
) -> Tensor:
    """Gather scalars from the ranks of a replica, or of ``group``: [ranks, values].

    If their dtypes differ, they are promoted to one that holds all of them.
    """
    own = torch.stack(list(values))
    return gather_runs(own, len(own), mesh, "scalars", group)


def gather_runs(
    run: Tensor,
    longest: int,
    mesh: DataParallelMesh,
    what: str,
    group: RankGroup | None = None,
) -> Tensor:
    """Gather the 1-D ``run`` of each rank: [ranks, longest], padded with zeros.

    ``longest`` is the largest of their lengths.

    Raises:
        StepError: some ranks cannot take part, inside `sw.join`.
    """
    device = run.device
    if device.type == "cpu" and mesh.accelerator is not None:  # a shard in host memory
        run = run.to(mesh.accelerator)
    group = mesh.shards if group is None else group
    with torch.inference_mode(mode=False):  # another thread writes to it
        gathered = run.new_zeros(group.size, longest)
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
