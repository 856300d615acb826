"""The position of a thread in its Python code, for the messages of ranks that wait for it.

A reference to a frame keeps its local variables alive, with the tensors in them, after the call has
returned. So these functions hold no frame while they wait for anything.
"""

import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["calls_of", "collective_of", "fingerprint"]

_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_PACKAGES = f"{_STANDARD}site-packages{os.sep}"
_ROOTS = (Path(torch.__file__).parent, Path(__file__).parents[2])  # torch and this package
_OURS = tuple(f"{root}{os.sep}" for root in _ROOTS)
_COLLECTIVES = inspect.getfile(distributed_c10d)
_OWN_GROUPS = "/shardwise/"  # part of the names of this package's groups
_POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list")


def calls_of(thread: int, most: int = 3) -> tuple[str, ...]:
    """Return the innermost calls of ``thread`` in the user's files: "train.py:12 in step"."""
    calls = [(one.f_code, one.f_lineno) for one in _frames(thread)]
    own = [(code, line) for code, line in calls if _is_of_user(code.co_filename)]
    return tuple(
        f"{_shortest(code.co_filename)}:{line} in {code.co_name}"
        for code, line in (own or calls)[:most]
    )


def collective_of(thread: int) -> list[int]:
    """Return the global ranks of the torch collective that ``thread`` is inside, or [].

    On the CPU such a call returns when all these ranks have made it. Collectives that this package
    launches on a device return immediately, and are left out.
    """
    for frame in _frames(thread):
        if frame.f_code.co_filename != _COLLECTIVES:
            continue
        name, local = frame.f_code.co_name, frame.f_locals
        if _OWN_GROUPS in getattr(local.get("group"), "group_name", ""):
            continue
        is_collective = not name.startswith("_") and "group" in local
        if is_collective and name not in _POINT_TO_POINT and not local.get("async_op"):
            with contextlib.suppress(KeyError, ValueError):  # the group was destroyed
                return dist.get_process_group_ranks(local["group"])
    return []


def fingerprint(thread: int) -> int:
    """Return a hash of the stack of ``thread``; it differs if the thread is at another place."""
    return hash(tuple((frame.f_code, frame.f_lasti) for frame in _frames(thread)))


def _frames(thread: int) -> Iterator[FrameType]:
    """The frames of ``thread``, innermost first."""
    # Python holds a lock of its own in this call. A destructor that waits there would never return
    # (python/cpython#106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_user(path: str) -> bool:
    is_standard = path.startswith(_STANDARD) and not path.startswith(_PACKAGES)
    return not (is_standard or path.startswith(_OURS))


def _shortest(path: str) -> str:
    """Return ``path`` relative to the current directory if it is inside."""
    folder = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(folder)
