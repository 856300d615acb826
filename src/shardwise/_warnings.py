"""Warnings that show the line of the user's program, however deep in shardwise they are raised."""

import inspect
import warnings

__all__ = ["warn_caller"]

_NOT_THE_USER = {"shardwise", "torch", "contextlib"}  # top-level packages


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the innermost line that is neither in shardwise nor in torch.

    `warnings.warn` counts frames, whose number depends on the way here: hooks of torch,
    constructors of subclasses and context managers add some.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USER:
            break
    assert frame is not None
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
