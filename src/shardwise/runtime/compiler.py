"""torch.compile and units: the graph breaks at a unit's call, and what the unit computes compiles.

`torch.compiler.disable` does the same, but importing it takes seconds in every program.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from shardwise._private import eval_frame

__all__ = ["break_graph", "pause", "resume", "run_resumed"]

F = TypeVar("F", bound=Callable[..., Any])


def break_graph(function: F) -> F:
    """Run ``function`` uncompiled, and compile the functions that it calls."""
    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@break_graph
def pause() -> Any:
    """Stop compiling what this thread calls; returns what `resume` takes."""
    return eval_frame.set_eval_frame(None)


@break_graph
def resume(compiler: Any) -> None:
    eval_frame.set_eval_frame(compiler)


@break_graph
def run_resumed(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with a paused compiler at work again."""
    eval_frame.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        eval_frame.set_eval_frame(None)
