"""`save`: every rank writes its own bytes into files that all ranks share."""

import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.collect import Collected, axis_of, check_name, collect, specs_of
from shardwise.checkpoint.directory import Retention
from shardwise.checkpoint.files import File, pack
from shardwise.checkpoint.manifest import Component
from shardwise.checkpoint.peers import Peers, peers_of
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.shares import Share, share_to_write
from shardwise.checkpoint.storage import Folder
from shardwise.checkpoint.write import Task, write
from shardwise.errors import CheckpointError

__all__ = ["MAX_FILE_BYTES", "Save", "save"]

MAX_FILE_BYTES = 5 * 10**9  # Hugging Face's default


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
    """Write a checkpoint to ``path``; all ranks have to call this.

    Each rank writes its own byte ranges of the shared files, without gathering anything: what it
    takes beside the model is a buffer of a few megabytes. The bytes on disk are the same whatever
    the strategy, the number of ranks, units and granularity. The checkpoint exists from the moment
    when all of it is on disk; until then, and if the process is killed, the directory has no
    manifest, and the next save there removes what is left. At a URL each file is sent by one rank,
    to which the others pass their bytes.

    Args:
        path: a directory that does not exist, or has no checkpoint in it; or such a place in a
            store, by a URL that fsspec knows, as in ``"s3://bucket/run/step-100"``. A number at
            the end of its name, as in ``step-100``, is what `latest` and `Retention` go by.
        model: sharded by `fully_shard`, between steps; or plain, and the same on every rank.
        optimizer: of the model's parameters; its states are saved by parameter name.
        wait: False returns as soon as this rank's shards are copied to host memory, and writes
            beside the next steps. Call ``wait()`` of what is returned before the process group is
            destroyed. The next `save` or `load` of the same model waits for it first. The memory
            of the copies stays for the next such save, until one with ``wait=True``, or a `load`.
        retention: which other checkpoints in the same directory stay; None keeps all of them.
        max_file_bytes: longer parts are split into several files.
        state: modules (a moving average), optimizers, objects with ``state_dict()``, and plain
            data (numbers, strings, tensors; lists, tuples and dicts of them). All but shards are
            taken from rank 0.

    Raises:
        CheckpointError: on every rank, and in the words of the rank where it happened: something
            cannot be saved or written, or an earlier ``wait=False`` failed. The model is as it
            was, and training may go on.
    """
    folder = folder_at(path)
    where = str(folder)
    axis = axis_of([model])
    peers = peers_of(axis, model)
    peers.meet(axis, _device_of(model), f"save to {where}")
    peers.settle()
    values = {"model": model, "optimizer": optimizer, **state}
    if optimizer is None:
        del values["optimizer"]
    with peers.together("collect its state"):
        for name in values:
            check_name(name)
        found = {name: collect(name, value, model) for name, value in sorted(values.items())}
        files = {name: pack(name, specs_of(name, x), max_file_bytes) for name, x in found.items()}
        _check_unique(files)
        task = _task(folder, found, files, peers.rank, retention)
        if wait:
            peers.staging.release()
        else:
            task = replace(task, shares=peers.staging.lend(task.shares))
    peers.meet(axis, _device_of(model), f"save {files}")
    return _start(task, peers, wait=wait)


class Save:
    """A checkpoint that is written, perhaps still."""

    def __init__(self, path: Path | str, job: Callable[[], None]) -> None:
        self.path = path
        self._job: Callable[[], None] | None = job
        self._errors: list[Exception] = []  # not yet raised
        self._done = threading.Event()
        weakref.finalize(self, _tell, path, self._errors)  # also when the interpreter ends

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written; said once.
        """
        self._done.wait()
        if self._errors:
            raise self._errors.pop()

    def run(self) -> None:
        """Write; errors are left for `wait`."""
        job, self._job = self._job, None
        assert job is not None
        _run([job], self._errors, self._done)

    def start(self) -> None:
        """Write on a thread; the interpreter does not end before it does."""
        job, self._job = self._job, None
        assert job is not None
        arguments = ([job], self._errors, self._done)
        threading.Thread(target=_run, args=arguments, name="shardwise-save").start()


def _run(box: list[Callable[[], None]], errors: list[Exception], done: threading.Event) -> None:
    """Do the job in ``box``, and let go of it and of the copies of the shards that it holds."""
    try:
        box.pop()()
    except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
        traceback.clear_frames(error.__traceback__)
        errors.append(error)
    finally:
        done.set()


def _tell(path: Path | str, errors: list[Exception]) -> None:
    if errors:
        warnings.warn(f"the save to {path} failed: {errors[0]}", stacklevel=2)


def _check_unique(files: Mapping[str, list[File]]) -> None:
    owners: dict[str, str] = {}
    for name in sorted(files, key=lambda name: len(files[name]), reverse=True):
        for file in files[name]:
            other = owners.setdefault(file.name, name)
            if other != name:
                raise CheckpointError(
                    f"{name}: {file.name} is also a file of {other}; use another name"
                )


def _task(
    directory: Folder,
    found: Mapping[str, Collected],
    files: Mapping[str, list[File]],
    rank: int,
    retention: Retention | None,
) -> Task:
    """What this rank writes."""
    components: dict[str, Component] = {}
    shares: dict[str, dict[str, Share]] = {}
    number = 0
    for name, part in found.items():
        components[name] = Component(part.kind, part.tree, tuple(files[name]), part.aliases)
        shares[name] = {}
        for key, tensor in sorted(part.tensors.items()):
            share = share_to_write(tensor, number, rank)
            if share is not None:
                shares[name][key] = share
            number += 1
    return Task(directory, components, shares, retention)


def _start(task: Task, peers: Peers, *, wait: bool) -> Save:
    if wait:
        pending = Save(task.directory.target, lambda: write(task, peers))
        pending.run()
        pending.wait()
    else:
        peers.pending = pending = Save(task.directory.target, lambda: _write_lent(task, peers))
        pending.start()
    return pending


def _write_lent(task: Task, peers: Peers) -> None:
    try:
        write(task, peers)
    finally:
        peers.staging.take_back(task.shares)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
