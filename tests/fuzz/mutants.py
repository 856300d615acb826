"""Faults of gradients that wait for a reduction: the fuzzer has to find each of them.

The engine had most of them once; the others are mistakes in what mended them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from shardwise.runtime.accumulation import AccumulatedGradients
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.scheduler import Scheduler

__all__ = ["MUTANTS", "mutated"]


def _do_nothing(*_args: Any) -> None:
    pass


def _rollback_and_drop(self: AccumulatedGradients) -> None:
    _ROLLBACK(self)
    self.drop()


def _restore_nothing(self: AccumulatedGradients, _copy: Any) -> None:
    self.drop()


def _set_all_but_sums_to_zero(self: AccumulatedGradients, position: int) -> None:
    with mock.patch.object(self, "_partial", None):
        _SET_TO_ZERO(self, position)


def _gets_gradient_if_trainable(self: Gradients, position: int) -> bool:
    return self.parameters[position].sharded.requires_grad


def _drop_before_conversion(self: Scheduler) -> None:
    if self.has_accumulated:
        self.drop_accumulated()


def _fail_and_drop(self: Scheduler, error: BaseException) -> None:
    self.drop_accumulated()
    _FAIL(self, error)


_ROLLBACK = AccumulatedGradients.rollback
_SET_TO_ZERO = AccumulatedGradients._set_to_zero
_FAIL = Scheduler.fail

# By what is wrong with it: where the engine is changed, and to what.
MUTANTS: Mapping[str, tuple[type, str, Callable[..., Any]]] = {
    "zero_grad keeps what was held": (AccumulatedGradients, "drop_replaced", _do_nothing),
    "zero_() keeps what was held": (AccumulatedGradients, "_set_to_zero", _do_nothing),
    "zero_() keeps partial sums": (
        AccumulatedGradients,
        "_set_to_zero",
        _set_all_but_sums_to_zero,
    ),
    "an exception in backward drops all": (AccumulatedGradients, "rollback", _rollback_and_drop),
    "an exception drops all": (Scheduler, "fail", _fail_and_drop),
    "an undone transaction drops all": (AccumulatedGradients, "restore", _restore_nothing),
    "a failed backward adds its part": (AccumulatedGradients, "rollback", _do_nothing),
    "freezing loses a gradient": (Gradients, "gets_gradient", _gets_gradient_if_trainable),
    "conversion drops all": (Scheduler, "reduce_accumulated", _drop_before_conversion),
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Let the engine have the fault ``name``; None for none."""
    if name is None:
        yield
        return
    owner, attribute, replacement = MUTANTS[name]
    with mock.patch.object(owner, attribute, replacement):
        yield
