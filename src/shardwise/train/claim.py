"""Keeps a second job out of a run directory.

A job that trains writes its `Owner` to `job.json` in the run directory, and renews the time of that
file as long as it lives. Nothing has to be unlocked: whoever finds the file looks whether its owner
lives. On this host the process answers that. On another host the file does, which is watched for a
while, so a job that was killed delays its successor but never blocks it. This needs neither locks,
which some network file systems lack, nor equal clocks.

A job may seem dead and come back: on a suspended machine, or a file system that did not answer. By
then another one may own the directory, so a job looks before each save whether it still does,
and ends otherwise.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from shardwise.checkpoint.directory import Owner
from shardwise.errors import ConfigError

__all__ = ["JOB_FILE", "check_owner", "claimed", "is_requeued"]

JOB_FILE = "job.json"
RENEW_SECONDS = 5.0
WATCH_SECONDS = 20.0  # several renewals


@dataclass(frozen=True)
class _Job:
    """The content of ``job.json``.

    Attributes:
        owner: the process.
        inode: that of the run directory, which tells a copy of the file on the same host.
        slurm: the number of the SLURM job, and how often it has been queued again; "" and "0"
            outside of SLURM.
        ended: whether the job has left the directory.
    """

    owner: Owner
    inode: int
    slurm: tuple[str, str]
    ended: bool = False


def _slurm() -> tuple[str, str]:
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")


def is_requeued(directory: Path) -> bool:
    """Whether the last job in ``directory`` was this SLURM job before it was queued again."""
    found, (number, restarts) = _read(directory / JOB_FILE), _slurm()
    if found is None or not number or found.slurm[0] != number:
        return False
    return found.slurm[1] != restarts  # else it is another command of the same job


@contextmanager
def claimed(directory: Path, key: str = "run.directory") -> Iterator[str]:
    """Own ``directory`` in the block, for `check_owner` by the token that is returned.

    Raise a ConfigError that names ``key``, the setting, if another job trains in it.
    """
    path, ended = directory / JOB_FILE, threading.Event()
    job, found = _Job(Owner.current(), directory.stat().st_ino, _slurm()), _read(path)
    if found is not None and not found.ended and _is_alive(path, found):
        owner = found.owner
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.saved_at))
        raise ConfigError(
            f"{key}: {directory} is in use by process {owner.pid} on {owner.host}, since "
            f"{since}; choose another, or end that job"
        )
    with _written(path, job) as file:
        renewing = threading.Thread(target=_renew, args=(file.fileno(), ended), daemon=True)
        renewing.start()
        try:
            yield job.owner.token
        finally:
            ended.set()
            renewing.join()
            with suppress(OSError):
                _mark_ended(path, job)


def check_owner(directory: Path, token: str) -> None:
    """Raise a ConfigError if another job has claimed ``directory`` after the one of ``token``."""
    found = _read(directory / JOB_FILE)
    if found is not None and found.owner.token != token:
        owner = found.owner
        raise ConfigError(
            f"run.directory: process {owner.pid} on {owner.host} has taken {directory} over, "
            "because this job seemed to have ended; nothing was saved since"
        )


def _is_alive(path: Path, job: _Job) -> bool:
    owner = job.owner
    if owner.is_on_this_host:  # on another one, a copy of the file is not renewed
        return job.inode == path.parent.stat().st_ino and not owner.has_ended
    sys.stderr.write(
        f"shardwise: {path.parent} was in use by process {owner.pid} on {owner.host}; watching for "
        f"{WATCH_SECONDS:.0f} s whether it still is\n"
    )
    first, until = _renewed_at(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_SECONDS))
        if _renewed_at(path) != first:
            found = _read(path)
            return found is not None and not found.ended
    return False


def _renewed_at(path: Path) -> int:
    """When ``path`` was renewed, in ns of the file system's clock; 0 if it is not there.

    It is opened because network file systems look for changes then.
    """
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _renew(file: int, ended: threading.Event) -> None:
    """Renew the time of an open file; by its name, it might be that of another job."""
    while not ended.wait(RENEW_SECONDS):
        with suppress(OSError):
            os.utime(file)


def _read(path: Path) -> _Job | None:
    """The job in ``path``; None if there is none."""
    try:
        found = json.loads(path.read_bytes())
        number, restarts = found["slurm"]
        owner = Owner(**found["owner"])
        return _Job(owner, found["inode"], (number, restarts), found["ended"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _written(path: Path, job: _Job) -> IO[str]:
    """Replace ``path``, and return the open file."""
    fresh = path.with_name(f"{path.name}.{job.owner.token}")
    file = fresh.open("w", encoding="utf-8")
    try:
        file.write(json.dumps(asdict(job)))
        file.flush()
        fresh.replace(path)
    except BaseException:
        file.close()
        fresh.unlink(missing_ok=True)
        raise
    return file


def _mark_ended(path: Path, job: _Job) -> None:
    found = _read(path)
    if found is not None and found.owner.token == job.owner.token:
        _written(path, replace(job, ended=True)).close()
