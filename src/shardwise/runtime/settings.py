"""What is set of a unit after `fully_shard`: kept by its module, applied to whatever runs it.

A unit is made anew when the module around it is sharded, and not before its parameters get storage
if they are on the meta device. Each function here applies one setting.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.engine import HANDLE, Handle
from shardwise.runtime.gradients import ReduceHook
from shardwise.runtime.scheduler import Scheduler

__all__ = [
    "all_reduce",
    "apply_kept",
    "divisor",
    "keep",
    "kept",
    "only_sums",
    "reduce",
    "reduce_hook",
    "reduced_hook",
    "reshard_after_backward",
    "reshard_after_forward",
]

_SETTINGS = "_shardwise_settings"  # of a module: values by the functions that apply them

Setting = Callable[[Scheduler, int, Any], None]


def keep(units: Iterable[nn.Module], apply: Setting, value: Any) -> None:
    """Apply ``value`` to ``units``, now and when they are made anew."""
    for unit in units:
        unit.__dict__.setdefault(_SETTINGS, {})[apply] = value
        handle: Handle | None = unit.__dict__.get(HANDLE)
        if handle is not None:
            apply(handle.runtime.scheduler, handle.index, value)


def kept(unit: nn.Module, apply: Setting) -> Any:
    """The value that is kept; None without one."""
    return unit.__dict__.get(_SETTINGS, {}).get(apply)


def apply_kept(unit: nn.Module, handle: Handle) -> None:
    """Apply all that is kept to what runs ``unit`` from now on."""
    for apply, value in unit.__dict__.get(_SETTINGS, {}).items():
        apply(handle.runtime.scheduler, handle.index, value)


def reshard_after_forward(scheduler: Scheduler, index: int, value: bool) -> None:
    """Whether the unit is freed after forward."""
    scheduler.sequencer.reshards[index] = value


def reshard_after_backward(scheduler: Scheduler, index: int, value: bool) -> None:
    """Whether it is freed in a backward that does not reduce."""
    scheduler.sequencer.reshards_after_backward[index] = value


def reduce(scheduler: Scheduler, index: int, value: bool) -> None:
    """Whether backward reduces its gradients."""
    scheduler.sequencer.reduce_grads[index] = value


def all_reduce(scheduler: Scheduler, index: int, value: bool) -> None:
    """Whether it does so over the column, too."""
    scheduler.sequencer.all_reduce_grads[index] = value


def divisor(scheduler: Scheduler, index: int, value: float) -> None:
    """What its gradients' sum is divided by."""
    for gradients in scheduler.units[index].gradients:
        gradients.divide_by(value)


def only_sums(scheduler: Scheduler, index: int, value: bool) -> None:
    """Whether the backend is asked for sums only, and their division is a pass of its own."""
    for gradients in scheduler.units[index].gradients:
        gradients.only_sums = value


def reduced_hook(scheduler: Scheduler, index: int, value: Callable[[Tensor], None]) -> None:
    """What is called with its reduced gradients."""
    for gradients in scheduler.units[index].gradients:
        gradients.shard.reduced_hook = value


def reduce_hook(scheduler: Scheduler, index: int, value: ReduceHook) -> None:
    """What reduces its gradients; see `GradientBuffer.reduce_with`."""
    scheduler.units[index].reduce_with(value)
