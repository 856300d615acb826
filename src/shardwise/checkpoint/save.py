"""`save`: every rank writes its own bytes of the shared files."""

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise._warnings import warn_caller
from shardwise.checkpoint.collect import WriteJob, check_kinds, checkpoint_mesh, collect
from shardwise.checkpoint.coordination import Coordinator, coordinated
from shardwise.checkpoint.directory import Retention
from shardwise.checkpoint.format import MAX_FILE_BYTES
from shardwise.checkpoint.manifest import Component, tensor_ids
from shardwise.checkpoint.slices import slice_to_write
from shardwise.checkpoint.stores import folder_at
from shardwise.checkpoint.write import write
from shardwise.errors import CheckpointError

__all__ = ["Save", "save"]


def save(
    path: str | os.PathLike[str],
    /,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    wait: bool = True,
    retention: Retention | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    **state: Any,
) -> "Save":
    """Write a checkpoint to ``path``. Every rank must call this.

    Each rank writes its own byte ranges of the shared files, so nothing is gathered, and a save
    takes a few megabytes of memory. The files do not depend on the strategy, the number of ranks,
    the units or the granularity. The checkpoint exists once all of it is on disk. If the process is
    killed before that, the directory has no manifest, and the next save to it, or one with
    ``retention`` next to it, removes its files. At a URL, one rank sends each file, with the bytes
    it receives from the others.

    Do not call this in a signal handler, which may run in the middle of ``optimizer.step()``, whose
    half the checkpoint would contain. Set a flag there, agree on it with all ranks after the step,
    and save then.

    Args:
        path: a directory that does not exist or contains no checkpoint, or the URL of one, in any
            store that fsspec supports, such as ``"s3://bucket/run/step-100"``. `latest` and
            `Retention` use the number at the end of its name.
        model: sharded by `fully_shard`, between steps; or not sharded. Parameters that are not
            sharded, such as ``ignored_params``, must be equal on every rank.
        optimizer: the optimizer of the model's parameters; states are saved by parameter name.
        wait: False returns as soon as this rank's shards are copied to host memory, and writes them
            during the next steps. Call ``wait()`` on the result before you destroy the process
            group. The next `save` or `load` of the same model first waits for this one. The memory
            of the copies is kept until a save with ``wait=True`` or a `load`.
        retention: which older checkpoints in the same directory to keep; None keeps all.
        max_file_bytes: a component with more bytes is split into several files.
        state: modules (such as a moving average), optimizers, objects with ``state_dict()``, and
            plain data (numbers, strings, tensors; lists, tuples and dicts of them). Everything
            except shards is saved from rank 0.

    Raises:
        CheckpointError: on every rank, with the message of the rank that failed: something cannot
            be saved or written, or an earlier save with ``wait=False`` failed. The model is
            unchanged, and training can continue.
        StepError: another rank raised (an interrupt, say), or is lost.
    """
    folder = folder_at(path)
    check_kinds("save", model, optimizer)
    mesh = checkpoint_mesh([model])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    values = {"model": model, "optimizer": optimizer, **state}
    if optimizer is None:
        del values["optimizer"]
    call, action = f"sw.save({str(folder)!r})", f"save to {folder}"
    with coordinated(mesh, model, device, call, action) as ranks:
        ranks.finish_pending()
        with ranks.raises_together("collect its state"):
            components: dict[str, Component] = {}
            tensors: dict[str, dict[str, Tensor]] = {}
            for name, value in sorted(values.items()):
                components[name], tensors[name] = collect(name, value, model, max_file_bytes)
            _check_unique(components)
        files = {name: component.files for name, component in components.items()}
        ranks.agree(mesh, device, f"save {files}")  # before collectives that cut tensors into runs
        slices = {
            number: own
            for (name, key), number in tensor_ids(components).items()
            if (own := slice_to_write(tensors[name][key], number, mesh)) is not None
        }
        job = WriteJob(folder, components, slices, retention)
        with ranks.raises_together("copy its state"):
            if wait:
                ranks.host_copies.clear()
            else:
                job = replace(job, slices=ranks.host_copies.copy(job.slices))
        if wait:
            write(job, ranks)
            return Save(folder.target)
        ranks.pending = saved = Save(
            folder.target, partial(_write_copies, job, ranks.in_background())
        )
        return saved


def _check_unique(components: Mapping[str, Component]) -> None:
    """Raise if two components would share a file, as one named "model-00001-of-00002" could."""
    owners: dict[str, str] = {}
    for name in sorted(components, key=lambda name: len(components[name].files), reverse=True):
        for file in components[name].files:
            other = owners.setdefault(file.name, name)
            if other != name:
                raise CheckpointError(
                    f"{name}: {file.name} is also a file of {other}; use another name"
                )


def _write_copies(job: WriteJob, ranks: Coordinator) -> None:
    try:
        write(job, ranks)
    finally:
        ranks.host_copies.reclaim(job.slices)


class Save:
    """A checkpoint that is being written or has been written.

    Attributes:
        path: the absolute path or the URL.
    """

    def __init__(self, path: Path | str, job: Callable[[], None] | None = None) -> None:
        """Run ``job``, which writes the checkpoint, on a thread; None if it is already complete.

        The interpreter waits for the thread before it exits.
        """
        self.path = path
        self._errors: list[Exception] = []  # errors that `wait` has not raised yet
        self._done = threading.Event()
        weakref.finalize(self, _warn, path, self._errors)  # also at the interpreter's exit
        if job is None:
            self._done.set()
            return
        # The thread must not refer to this object, whose finalizer warns of an error.
        arguments = (job, self._errors, self._done)
        threading.Thread(target=_run, args=arguments, name="shardwise-save").start()

    def __repr__(self) -> str:
        return f"Save({str(self.path)!r}, {'done' if self.is_done else 'being written'})"

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: the checkpoint could not be written. It is raised only once.
        """
        self._done.wait()
        if self._errors:
            raise self._errors.pop()


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
        warn_caller(f"the save to {path} failed: {errors[0]}")
