"""A warning about optimizers that step shards in host memory slowly.

Beside a GPU, such a step takes most of the time of training, and two defaults make it several times
slower: torch's loop over parameters instead of fused kernels, and one thread per rank, which
torchrun sets. The engine does not change the number of threads itself: sums, and fused SGD in
bfloat16, have other bits with another number (docs/log.md).
"""

import os
import weakref
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._warnings import warn_caller
from shardwise.comm.device import is_accelerator
from shardwise.runtime.engine import Runtime
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = ["watch"]

_on_host: "weakref.WeakSet[Sharding]" = weakref.WeakSet()  # of a model that computes elsewhere
_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def watch(runtime: Runtime) -> None:
    """Warn at the first step of an optimizer that steps units of ``runtime`` on the host slowly."""
    if not is_accelerator(runtime.pools.device):
        return
    for unit in runtime.units:
        if unit.plan.offloads_gradients:
            _on_host.update(parameter.sharding for parameter in unit.parameters)
    _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_warn)


def _warn(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    groups = [  # of optimizers with fused kernels
        group
        for group in optimizer.param_groups
        if "fused" in group and any(sharding_of(one) in _on_host for one in group["params"])
    ]
    kind = type(optimizer).__name__
    advice = []
    if not all(group["fused"] for group in groups):
        advice.append(f"{kind}(..., fused=True) uses fast kernels")
    cores = _cores_of_rank()
    if groups and torch.get_num_threads() == 1 < cores:
        advice.append(
            f"torch.set_num_threads({cores}) at the start of the program uses this rank's cores, "
            "not one of them, as torchrun has it"
        )
    if advice:
        warn_caller(
            f"{kind} steps shards in host memory slowly: {'; '.join(advice)}. "
            "CPUOffloadPolicy(step='device') steps them on the device instead"
        )


def _cores_of_rank() -> int:
    """The cores that this process may use, divided by the ranks of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal():
        num_ranks = int(ranks)
    else:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, (cores or 1) // max(1, num_ranks))
