"""Call an optimizer's ``step`` for the parameters of one unit at a time.

Only optimizers that treat every element alone give the same numbers in this way: those of
`ELEMENTWISE`, and classes that declare it with ``steps_units = True``. All others are refused.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from shardwise.errors import StepError
from shardwise.runtime.attach import unowned_states

__all__ = [
    "ELEMENTWISE",
    "check_elementwise",
    "groups_of",
    "one_step_at_a_time",
    "step_only",
    "with_evaluated_closure",
]

State = dict[str, Any]  # options of a group, or keyword arguments

# Torch's optimizers whose step treats every element alone.
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


@contextmanager
def one_step_at_a_time(optimizer: Optimizer, way_out: str) -> Iterator[None]:
    """Raise a StepError if stepping one unit changes an option, or a state of no parameter."""
    before = _shared_by_units(optimizer)
    yield
    changed = {
        str(key)
        for old, new in zip(before, _shared_by_units(optimizer), strict=True)
        for key in new
        if key not in old or not _is_same(old[key], new[key])
    }
    if changed:
        raise StepError(
            f"{type(optimizer).__name__} changed {', '.join(sorted(changed))}, which parameters "
            f"share, in the step of one unit, so it would count units instead of steps; {way_out}"
        )


def _shared_by_units(optimizer: Optimizer) -> list[dict[Any, Any]]:
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    unowned = unowned_states(optimizer).items()
    return [*options, {k: v.clone() if isinstance(v, Tensor) else v for k, v in unowned}]


def _is_same(old: object, new: object) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old is new or torch.equal(old, new)
    return old is new or (type(old) is type(new) and isinstance(new, (int, float)) and old == new)


def groups_of(optimizer: Optimizer) -> dict[Tensor, int]:
    """The numbers of the groups of all parameters."""
    groups = enumerate(optimizer.param_groups)
    return {p: number for number, group in groups for p in group["params"]}


def step_only(optimizer: Optimizer, groups: dict[int, list[Tensor]]) -> None:
    """Step the tensors in ``groups``, by number of group, without the hooks of the optimizer."""
    # torch wraps `step` in what calls the hooks.
    step: Callable[[Optimizer], object] = type(optimizer).step
    originals = [group["params"] for group in optimizer.param_groups]
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = groups.get(number, [])
        getattr(step, "__wrapped__", step)(optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, originals, strict=True):
            group["params"] = parameters


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise a StepError if calling ``optimizer`` unit by unit might not give the same numbers."""
    kind = type(optimizer)
    step = _code_of(kind)
    author = next(one for one in reversed(kind.__mro__) if _code_of(one) is step)
    below = kind.__mro__[: kind.__mro__.index(author) + 1]
    declared = next((vars(one)["steps_units"] for one in below if "steps_units" in vars(one)), None)
    if declared or (declared is None and author in _AUTHORS):
        return
    reason = (
        "is not known to treat every element alone; if its step() may be called for the parameters "
        f"of one unit at a time, set {kind.__name__}.steps_units = True, otherwise pass"
        if declared is None
        else "works on whole matrices that ranks exchange, not on units; pass"
    )
    raise StepError(
        f"{kind.__name__} {reason} CPUOffloadPolicy(step='host') to fully_shard: with "
        "step='device', the optimizer steps one unit after the other"
    )


def _code_of(kind: type) -> object:
    """The ``step`` of a class, without the wrappers of torch."""
    step = getattr(kind, "step", None)
    return None if step is None else inspect.unwrap(step)


_AUTHORS = {  # of the steps in `ELEMENTWISE`; some classes inherit theirs
    next(one for one in reversed(kind.__mro__) if _code_of(one) is _code_of(kind))
    for kind in ELEMENTWISE
}


def with_evaluated_closure(args: tuple[Any, ...], kwargs: State) -> tuple[tuple[Any, ...], State]:
    """Replace a closure among the arguments of ``step`` by its result."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss), kwargs
