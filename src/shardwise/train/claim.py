"""Keeps a second job out of a run directory.

A job that trains writes its `Owner` to `job.json` in the run directory, and renews the time of that
file as long as it lives. Nothing has to be unlocked: whoever finds the file looks whether its owner
lives. On this host the process answers that. On another host the file does, which is watched for a
while, so a job that was killed delays its successor but never blocks it. This needs neither locks,
which some network file systems lack, nor equal clocks.

A job may seem dead and come back: a machine that stood still, or a file system that did not answer.
By then another one may own the directory, so a job looks before each save whether it still does,
and ends otherwise.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from shardwise.checkpoint.directory import Owner
from shardwise.errors import ConfigError

__all__ = ["JOB_FILE", "check_owner", "claimed"]

JOB_FILE = "job.json"
RENEW_SECONDS = 5.0
WATCH_SECONDS = 20.0  # several renewals


@contextmanager
def claimed(directory: Path) -> Iterator[str]:
    """Own ``directory`` in the block, for `check_owner` by the token that is returned.

    Raise a ConfigError if another job trains in it.
    """
    path, owner, ended = directory / JOB_FILE, Owner.current(), threading.Event()
    found = _read(path)
    if found is not None and _is_alive(path, found):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.saved_at))
        raise ConfigError(
            f"run.directory: {directory} is in use by process {found.pid} on {found.host}, since "
            f"{since}; choose another, or end that job"
        )
    with _written(path, owner, ended=False) as file:
        renewing = threading.Thread(target=_renew, args=(file.fileno(), ended), daemon=True)
        renewing.start()
        try:
            yield owner.token
        finally:
            ended.set()
            renewing.join()
            with suppress(OSError):
                _say_that_it_ended(path, owner)


def check_owner(directory: Path, token: str) -> None:
    """Raise a ConfigError if another job has claimed ``directory`` after the one of ``token``."""
    found = _read(directory / JOB_FILE, even_if_ended=True)
    if found is not None and found.token != token:
        raise ConfigError(
            f"run.directory: process {found.pid} on {found.host} has taken {directory} over, "
            "because this job seemed to have ended; nothing was saved since"
        )


def _is_alive(path: Path, owner: Owner) -> bool:
    if owner.is_on_this_host:
        return not owner.has_ended
    sys.stderr.write(
        f"shardwise: {path.parent} was in use by process {owner.pid} on {owner.host}; watching for "
        f"{WATCH_SECONDS:.0f} s whether it still is\n"
    )
    first, until = _renewed_at(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_SECONDS))
        if _renewed_at(path) != first:
            found = _read(path)
            return found is not None  # else it ended meanwhile
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


def _read(path: Path, *, even_if_ended: bool = False) -> Owner | None:
    """The owner in ``path``; None if there is none, or if it has ended."""
    try:
        found = json.loads(path.read_bytes())
        return None if found.pop("ended") and not even_if_ended else Owner(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _written(path: Path, owner: Owner, *, ended: bool) -> IO[str]:
    """Replace ``path``, and return the open file."""
    fresh = path.with_name(f"{path.name}.{owner.token}")
    file = fresh.open("w", encoding="utf-8")
    try:
        file.write(json.dumps(asdict(owner) | {"ended": ended}))
        file.flush()
        fresh.replace(path)
    except BaseException:
        file.close()
        fresh.unlink(missing_ok=True)
        raise
    return file


def _say_that_it_ended(path: Path, owner: Owner) -> None:
    found = _read(path)
    if found is not None and found.token == owner.token:
        _written(path, owner, ended=True).close()
