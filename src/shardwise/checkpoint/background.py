"""Saves in the background: the thread that writes, and the copies in host memory that it writes."""

import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.slices import Slices, TensorSlice
from shardwise.transport.device import wait_for_device

__all__ = ["HostCopies", "Save"]


class Save:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: the absolute path, or the URL.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self._errors: list[Exception] = []  # not yet raised
        self._done = threading.Event()
        weakref.finalize(self, _warn, path, self._errors)  # also at the interpreter's exit

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written; raised once.
        """
        self._done.wait()
        if self._errors:
            raise self._errors.pop()

    def run(self, job: Callable[[], None]) -> None:
        """Write it by calling ``job``; `wait` raises the error if there is one."""
        _run(job, self._errors, self._done)

    def start(self, job: Callable[[], None]) -> None:
        """Write it on a thread, which the interpreter waits for before it exits."""
        arguments = (job, self._errors, self._done)  # without this object, so that it can warn
        threading.Thread(target=_run, args=arguments, name="shardwise-save").start()


def _run(job: Callable[[], None], errors: list[Exception], done: threading.Event) -> None:
    try:
        job()
    except Exception as error:  # noqa: BLE001 - `Save.wait` raises it
        traceback.clear_frames(error.__traceback__)  # which refer to copies of shards
        errors.append(error)
    finally:
        done.set()


def _warn(path: Path | str, errors: list[Exception]) -> None:
    if errors:
        warnings.warn(f"the save to {path} failed: {errors[0]}", stacklevel=2)


class HostCopies:
    """Copies of slices in host memory, which a save with ``wait=False`` writes.

    The memory is kept for the next save: copying into new memory takes twice as long or more.
    """

    def __init__(self) -> None:
        self._free: dict[int, Tensor] = {}

    def copy(self, slices: Slices) -> Slices:
        """Copies of ``slices``, whose memory is not reused until `reclaim`."""
        free, self._free = self._free, {}
        copies = {
            number: TensorSlice(own.start, _copied(own.elements, free.pop(number, None)))
            for number, own in slices.items()
        }
        for device in {own.elements.device for own in slices.values()}:
            wait_for_device(device)  # once for all copies
        return copies

    def reclaim(self, copies: Slices) -> None:
        """Reuse the memory of ``copies`` in the next save."""
        self._free = {number: copy.elements for number, copy in copies.items()}

    def clear(self) -> None:
        """Free the memory that is kept."""
        self._free = {}


def _copied(source: Tensor, memory: Tensor | None) -> Tensor:
    """A copy under way, in ``memory`` if that fits, and pinned if the source is on a GPU."""
    pinned = source.device.type != "cpu"
    fits = (
        memory is not None
        and memory.shape == source.shape
        and memory.dtype is source.dtype
        and memory.is_pinned() == pinned
    )
    if memory is None or not fits:
        memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    return memory.copy_(source, non_blocking=pinned)
