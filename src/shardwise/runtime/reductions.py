"""Whole answers from runs: norms, sums and extremes of tensors that lie on several ranks.

Every function here exchanges something, so all ranks of the axis have to call it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.plan.layout import Run
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.transport.api import RankGroup
from shardwise.transport.communicator import communicator
from shardwise.transport.device import current_gpu

__all__ = ["across", "combine", "gather_runs", "norms"]


def combine(kind: str, run: Tensor, num_elements: int, axis: DataParallelMesh) -> Tensor:
    """Reduce a tensor of ``num_elements``, of which ``run`` is here, to a scalar.

    ``kind`` is "sum", "mean", "max", "min", "all" or "any".
    """
    match kind:
        case "sum" | "mean":
            total = across([run.sum()], axis).sum()
            return total / num_elements if kind == "mean" else total
        case "all":
            return across([run.all().to(torch.uint8)], axis).amin().to(torch.bool)
        case "any":
            return across([run.any().to(torch.uint8)], axis).amax().bool()
        case _:
            pick = torch.amax if kind == "max" else torch.amin
            if not num_elements:
                raise ValueError(f"{kind} of a tensor without elements")
            # A rank without elements offers what is never picked.
            worst = _bounds(run.dtype)[0 if kind == "max" else 1]
            value = pick(run) if run.numel() else run.new_full((), worst)
            extreme: Tensor = pick(across([value], axis))
            return extreme


def norms(runs: Sequence[Tensor], axis: DataParallelMesh, order: float) -> list[Tensor]:
    """Vector norms of tensors of which every rank has a run, in one exchange."""
    local = [_run_norm(run, order) for run in runs]
    by_tensor = across([norm.to(local[0].dtype) for norm in local], axis).unbind(1)
    return [
        torch.linalg.vector_norm(parts, order).to(norm.dtype)
        for parts, norm in zip(by_tensor, local, strict=True)
    ]


def across(
    values: Sequence[Tensor], axis: DataParallelMesh, group: RankGroup | None = None
) -> Tensor:
    """Gather scalars of one dtype: [ranks, values], from those that share a model or ``group``."""
    own = torch.stack(list(values))
    runs = [Run(0, own.numel())] * (axis.shards if group is None else group).size
    return gather_runs(own, runs, axis, "scalars", group)


def gather_runs(
    run: Tensor,
    runs: Sequence[Run],
    axis: DataParallelMesh,
    what: str,
    group: RankGroup | None = None,
) -> Tensor:
    """Gather 1-D pieces of the lengths of ``runs``: [ranks, longest], padded with zeros."""
    device = run.device
    if device.type == "cpu" and axis.backend("cuda") == "nccl" and not axis.on_cpu:
        run = run.to(current_gpu())  # a shard on the host
    longest = max(len(other) for other in runs)
    with torch.inference_mode(mode=False):  # a stream writes to it, on a thread of its own
        gathered = run.new_zeros(len(runs), longest)
    group = axis.shards if group is None else group
    links = communicator(axis.world, run.device)
    links.recover()

    def fill() -> None:
        gathered[group.index, : run.numel()].copy_(run)

    label = f"gather {what}"
    links.wait(links.reduce.all_gather(gathered.view(-1), group, label, fill))
    return gathered.to(device)


def _run_norm(run: Tensor, order: float) -> Tensor:
    if run.numel():
        norm: Tensor = torch.linalg.vector_norm(run, order)
        return norm
    # Real, as the norm of complex numbers is: all ranks have to send the same dtype.
    nothing = math.inf if order == -math.inf else 0.0
    return run.new_full((), nothing, dtype=run.dtype.to_real())


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    info = torch.iinfo(dtype)
    return info.min, info.max
