"""Steps of shards in host memory, on all cores of this rank.

Beside a GPU, such a step takes most of the time of training, and two defaults make it several times
slower: torch's loop over parameters instead of fused kernels, and one thread per rank, which
torchrun sets. A step of fused kernels whose bits do not depend on the number of threads uses all
cores of this rank. Of other optimizers, the first step on one thread warns: sums, and fused SGD in
bfloat16, have other bits with another number of threads (docs/log.md).
"""

import contextlib
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
from shardwise.errors import StepError
from shardwise.features.unit_steps import check_elementwise, with_evaluated_closure
from shardwise.runtime.engine import Runtime
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = ["ANY_THREADS", "watch"]

_on_host: "weakref.WeakSet[Sharding]" = weakref.WeakSet()  # of a model that computes elsewhere
_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_hooks: "weakref.WeakKeyDictionary[Optimizer, Any]" = weakref.WeakKeyDictionary()  # before steps
_threads_before: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()

# Their fused kernels have the same bits with any number of threads.
ANY_THREADS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def watch(runtime: Runtime) -> None:
    """Use all cores in optimizers' steps of the units of ``runtime`` that are on the host."""
    if not is_accelerator(runtime.pools.device):
        return
    for unit in runtime.units:
        if unit.plan.offloads_gradients:
            _on_host.update(parameter.sharding for parameter in unit.parameters)
    _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_watch_optimizer)


def _watch_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Set threads after all other hooks: if one of them raises an error, they stay as they are."""
    _end(optimizer, args, kwargs)  # the step before, if it has raised an error
    hook = _hooks.pop(optimizer, None)
    if hook is not None:
        hook.remove()
    if not any(_has_host_shards(group) for group in optimizer.param_groups):
        return
    if hook is None:
        after: Any = optimizer.register_step_post_hook(_end)
        after.hooks_dict_ref().move_to_end(after.id, last=False)  # others may raise an error
    _hooks[optimizer] = optimizer.register_step_pre_hook(_begin)  # the last one


def _has_host_shards(group: dict[str, Any]) -> bool:
    return any(sharding_of(one) in _on_host for one in group["params"])


def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    groups = [group for group in optimizer.param_groups if _has_host_shards(group)]
    is_fused = all(group["fused"] for group in groups if "fused" in group)
    is_alone = torch.get_num_threads() == 1 < _cores_of_rank()
    if is_alone and is_fused and type(optimizer) in ANY_THREADS:
        args, kwargs = with_evaluated_closure(args, kwargs)  # on one thread
        _threads_before[optimizer] = 1
        torch.set_num_threads(_cores_of_rank())
    elif optimizer not in _seen:
        _warn(optimizer, is_fused=is_fused, is_alone=is_alone)
    _seen.add(optimizer)
    return args, kwargs


def _end(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    before = _threads_before.pop(optimizer, None)
    if before is not None:
        torch.set_num_threads(before)


def _warn(optimizer: Optimizer, *, is_fused: bool, is_alone: bool) -> None:
    kind = type(optimizer).__name__
    advice = [] if is_fused else [f"{kind}(..., fused=True) uses fast kernels"]
    if is_alone and type(optimizer) not in ANY_THREADS:
        advice.append(
            f"torch.set_num_threads({_cores_of_rank()}) at the start of the program uses this "
            "rank's cores, not one of them, as torchrun has it"
        )
    if not advice:
        return
    with contextlib.suppress(StepError):  # others cannot be stepped there
        check_elementwise(optimizer)
        advice.append("CPUOffloadPolicy(step='device') steps them on the device instead")
    warn_caller(f"{kind} steps shards in host memory slowly: {'; '.join(advice)}")


def _cores_of_rank() -> int:
    """The cores that this process may use, divided by the ranks of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal():
        num_ranks = int(ranks)
    else:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, (cores or 1) // max(1, num_ranks))
