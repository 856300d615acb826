"""torch.compile and units: the graph breaks at a unit's call, and what the unit computes compiles.

`torch.compiler.disable` does the same, but importing it takes seconds in every program.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["break_graph", "pause", "resume", "run_resumed"]

F = TypeVar("F", bound=Callable[..., Any])

_dynamo = torch._C._dynamo.eval_frame  # no public names


def break_graph(function: F) -> F:
    """Run ``function`` as it is and compile what it calls."""
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@break_graph
def pause() -> Any:
    """Stop compiling what this thread calls; returns what `resume` takes."""
    return _dynamo.set_eval_frame(None)


@break_graph
def resume(compiler: Any) -> None:
    _dynamo.set_eval_frame(compiler)


@break_graph
def run_resumed(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with a paused compiler at work again."""
    _dynamo.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        _dynamo.set_eval_frame(None)
