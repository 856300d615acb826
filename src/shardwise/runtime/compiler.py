"""Graph breaks at the calls of units under torch.compile; the forwards of units are compiled.

`torch.compiler.disable` does the same, but its import takes seconds in every program.
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
    """Stop compilation in this thread. Returns the argument of `resume`."""
    return eval_frame.set_eval_frame(None)


@break_graph
def resume(compiler: Any) -> None:
    eval_frame.set_eval_frame(compiler)


@break_graph
def run_resumed(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the paused ``compiler`` resumed."""
    eval_frame.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        eval_frame.set_eval_frame(None)
