"""Where the engine listens: module calls, autograd nodes and gradients of parameters.

The only file that touches them, and what each hook rests on:

- *A unit's call* is seen by overriding ``__call__`` in a class made for the module, so that an
  exception is seen as well and no order among forward hooks matters.
- *Backward reaches a unit* when autograd runs the node that made one of its outputs, or a tensor
  that its forward left in an attribute (``self.loss = ...``). For a view, the node of its base is
  watched too: an in-place operation replaces a view's own node.
- *A gradient is ready* when AccumulateGrad has run (``register_post_accumulate_grad_hook``).
- *Backward ends* when autograd runs the callbacks queued for the graph task. If it dies instead,
  the callback object is dropped, and its ``__del__`` says so.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwise.errors import StepError
from shardwise.schedule.sequencer import Outcome

__all__ = [
    "at_end_of_backward",
    "check_first_order",
    "current_task",
    "on_gradient",
    "tensors_left_in",
    "watch_outputs",
]

NO_TASK = -1
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_FIRST_PARTS = 64
_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, nn.Module)


def current_task() -> int:
    """Autograd's graph task that this thread is in, or `NO_TASK`."""
    task: int = torch._C._current_graph_task_id()  # no public name
    return task


def watch_outputs(
    output: Any, left: Iterable[Tensor], callback: Callable[[], None], *, trainable: bool
) -> Outcome:
    """Have ``callback`` called when backward reaches any tensor in ``output`` or ``left``.

    ``trainable`` says that the module has parameters to train. Then a tensor without gradients
    counts as one with them, for it may have them on other ranks, whose data took another way; and
    who returns no tensor at all may have left some where nobody looks for them.
    """
    if not torch.is_grad_enabled():
        return Outcome.DETACHED
    returned = list(tensors_in(output))
    nodes = {node for tensor in (*returned, *left) for node in _nodes_of(tensor)}
    for node in nodes:
        node.register_prehook(lambda _gradients: callback())
    if nodes or (trainable and returned):
        return Outcome.DIFFERENTIABLE
    return Outcome.HIDDEN if trainable else Outcome.DETACHED


def tensors_left_in(module: nn.Module, mark: str) -> Iterator[Tensor]:
    """Tensors in attributes of ``module`` and of modules inside it, but for other units.

    A unit has an attribute named ``mark``.

    Tensors may be buffers, or up to three containers or objects deep in an attribute. Of long
    containers that begin with something else only the first parts are looked at: this runs at every
    call, and modules hold vocabularies, too.
    """
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not isinstance(value, _LEAVES):
            yield from _tensors_within(value, depth=3)
    for child in module.children():
        if mark not in vars(child):
            yield from tensors_left_in(child, mark)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from tensors_in(part, seen)


def on_gradient(parameter: Tensor, callback: Callable[[], None]) -> None:
    """Have ``callback`` called each time a gradient has been accumulated into ``parameter``."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(lambda _parameter: callback())  # type: ignore[no-untyped-call]


def at_end_of_backward(
    finish: Callable[[], None], abandon: Callable[[BaseException], None]
) -> None:
    """Have one of both called when the graph task of this thread has ended well, or died."""
    engine = Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


def check_first_order() -> None:
    """Refuse a backward that records its own graph."""
    if torch.is_grad_enabled():
        raise StepError(
            "backward(create_graph=True) through a sharded model is not supported: the second "
            "backward would read parameters that are freed; shard only what the first one needs"
        )


class _End:
    """Called when a graph task ends, dropped without it when the task dies."""

    def __init__(
        self, finish: Callable[[], None], abandon: Callable[[BaseException], None]
    ) -> None:
        self._finish = finish
        self._abandon = abandon
        self._is_over = False

    def __call__(self) -> None:
        try:
            self._finish()
        except BaseException as error:
            self._is_over = True
            self._abandon(error)
            raise
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over and not sys.is_finalizing():
            self._abandon(RuntimeError("an exception in backward"))


def _tensors_within(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        parts = iter(_parts(value))
        first = next(parts, None)
        if isinstance(first, Tensor):
            yield first
            yield from (part for part in parts if isinstance(part, Tensor))
            return
        for part in (first, *islice(parts, _FIRST_PARTS)):
            if not isinstance(part, _LEAVES):
                yield from _tensors_within(part, depth - 1)


def _nodes_of(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None:
            yield base.grad_fn


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from vars(value).values()
