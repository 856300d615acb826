"""Shows units as ranges in the traces of ``torch.profiler``."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.profiler import record_function

from shardwise.runtime.ledger import LedgerReader, Record
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind, describe

__all__ = ["unit_ranges"]


@contextlib.contextmanager
def unit_ranges(model: nn.Module) -> Iterator[None]:
    """Add the work of each unit of ``model`` to the trace of a profiler that runs in the block::

        with unit_ranges(model), torch.profiler.profile() as profile:
            model(batch).sum().backward()

    ``forward layers.0`` contains the operators of that forward. ``backward layers.0`` ends where
    the backward of the next unit begins. Gathers, waits and reductions are marks without duration
    at their launch; `sw.record` measures them.
    """
    runtime = runtime_of_root(model)
    labels = [unit.label for unit in runtime.plan.units]
    reader = _Ranges(labels)
    runtime.scheduler.ledger.readers.append(reader)
    with contextlib.ExitStack() as hooks:
        for unit, label in zip(runtime.plan.units, labels, strict=True):
            _name_forward(model.get_submodule(unit.name), label, hooks)
        try:
            yield
        finally:
            runtime.scheduler.ledger.readers.remove(reader)


def _name_forward(module: nn.Module, label: str, hooks: contextlib.ExitStack) -> None:
    open_ranges: list[record_function] = []

    def begin(*_: Any) -> None:
        open_ranges.append(_begin(f"forward {label}"))

    def end(*_: Any) -> None:
        _end(open_ranges.pop())

    hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
    hooks.callback(module.register_forward_hook(end, always_call=True).remove)


class _Ranges(LedgerReader):
    def __init__(self, labels: list[str]) -> None:
        self._labels = labels
        self._backward: tuple[int, record_function] | None = None  # thread, and open range

    def appended(self, record: Record) -> None:
        kind, name = record.event.kind, describe(record.event, self._labels)
        if kind is EventKind.BACKWARD:
            self._end_backward()
            self._backward = threading.get_ident(), _begin(name)
        elif kind is not EventKind.FORWARD:
            _end(_begin(name))

    def step_ended(self, *_: Any) -> None:
        self._end_backward()

    def step_abandoned(self) -> None:
        self._end_backward()

    def _end_backward(self) -> None:
        """End the range, but only on the thread where it began, as the profiler requires."""
        if self._backward is not None and self._backward[0] == threading.get_ident():
            _end(self._backward[1])
        self._backward = None


def _begin(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()  # type: ignore[no-untyped-call]
    return span


def _end(span: record_function) -> None:
    span.__exit__(None, None, None)
