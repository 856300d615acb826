"""Targets of `publish` that are directories: on a disk, or in the memory of one host.

Each tensor is a safetensors file of its own, named after the version that last changed it::

    model.safetensors.index.json     {"metadata": {"version": 8, ...}, "weight_map": {...}}
    model-v7-00001.safetensors       a tensor that version 8 has not changed
    model-v8-00002.safetensors

The index decides what the current version is, and is replaced by one rename. A file is never
changed, so a reader has either all files of a version or finds that one of them is gone, and reads
the index again.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shardwise.checkpoint.format import File, parse_header, parse_json, spec_of
from shardwise.checkpoint.slices import bytes_of
from shardwise.checkpoint.stores import sync
from shardwise.errors import CheckpointError, CheckpointNotFound
from shardwise.weights.updates import Manifest, Update

__all__ = ["Directory", "Published", "SharedMemory", "read_published"]

INDEX = "model.safetensors.index.json"
_LOCK = ".publish.lock"
_OWN_NAME = re.compile(r"model-v\d+-\d+\.safetensors")
_LENGTH_BYTES = 8


class Directory:
    """A directory with one safetensors file per tensor, which Hugging Face's libraries read."""

    accepts_runs = False
    _syncs = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._manifest = Manifest(0, None, {})
        self._sent: dict[str, str] = {}  # files by tensor
        self._lock: IO[bytes] | None = None  # from `begin` to `commit`; the system frees it

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(other)["path"] == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def version(self) -> int:
        return _read_index(self.path)[0]

    @property
    def identity(self) -> str:
        """Differs for each version that was ever committed; "" if a file of it is gone."""
        with contextlib.suppress(FileNotFoundError):
            metadata = parse_json((self.path / INDEX).read_bytes())["metadata"]
            if all((self.path / file).exists() for file in _read_index(self.path)[1].values()):
                return str(metadata.get("id", ""))
        return ""

    def begin(self, manifest: Manifest) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.path.rglob("*.safetensors")):
            if file.parent != self.path or not _OWN_NAME.fullmatch(file.name):
                raise CheckpointError(
                    f"{file}: sw.publish has not written this file, and all .safetensors files in "
                    "its directory belong to the current version; choose another directory"
                )
        self._take_lock()
        self._manifest = manifest
        self._check_last_version()
        self._remove_others()
        self._sent.clear()

    def send(self, bucket: Sequence[Update]) -> None:
        self._check_last_version()
        manifest = self._manifest
        numbers = {name: number for number, name in enumerate(manifest.tensors, start=1)}
        for update in bucket:
            tensor = update.values if update.starts is None else self._changed(update)
            name = f"model-v{manifest.version}-{numbers[update.name]:05}.safetensors"
            spec = spec_of(update.name, tensor)
            self._write(name, File(name, (spec,)).head, bytes_of(tensor.reshape(-1)))
            self._sent[update.name] = name

    def commit(self, version: int) -> None:
        self._check_last_version()
        infos, files = self._manifest.tensors, self._current() | self._sent
        missing = [name for name in infos if name not in files]
        if missing:
            raise CheckpointError(f"{self.path}: {missing[0]} was not sent")
        total = sum(prod(info.shape) * info.dtype.itemsize for info in infos.values())
        weight_map = {name: files[name] for name in sorted(infos)}
        metadata = {"total_size": total, "version": version, "id": secrets.token_hex(8)}
        index = {"metadata": metadata, "weight_map": weight_map}
        self._write(INDEX, json.dumps(index, indent=2).encode())
        # Without waiting for the disk, so that files of two versions are there for a short time.
        for file in (*self._sent.values(), INDEX):
            _partial(self.path / file).rename(self.path / file)
        self._remove_others()
        if self._syncs:
            sync(self.path)
        self._lock = None

    def _take_lock(self) -> None:
        """Refuse other programs until `commit`, or until this one ends."""
        self._lock = None  # of a version that was not committed
        lock = (self.path / _LOCK).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.path}: another program publishes there now") from None
        except OSError:  # the file system has no locks
            return
        self._lock = lock

    def _write(self, name: str, *contents: bytes | memoryview) -> None:
        """Write a file under a name that does not end in .safetensors."""
        with _partial(self.path / name).open("wb") as stream:
            for content in contents:
                stream.write(content)
            if self._syncs:
                stream.flush()
                os.fsync(stream.fileno())

    def _current(self) -> dict[str, str]:
        """The files of the current version, if updates build on it."""
        return {} if self._manifest.base is None else _read_index(self.path)[1]

    def _check_last_version(self) -> None:
        """Raise a CheckpointError if another program has published since the last version."""
        found, expected = self.version, self._manifest.version - 1
        if found != expected:
            raise CheckpointError(
                f"{self.path}: has version {found}, expected {expected}; another program publishes "
                "there"
            )

    def _changed(self, update: Update) -> Tensor:
        """A copy of a tensor of the current version with the changes of ``update``."""
        whole = _map_tensor(self.path / self._current()[update.name])[1].clone()
        update.to("cpu").apply_(whole)
        return whole

    def _remove_others(self) -> None:
        """Remove files of other versions, and of a version that was not committed."""
        kept = set(_read_index(self.path)[1].values())
        for file in self.path.iterdir():
            is_partial = file.name.startswith(".") and file.name.endswith(".partial")
            if is_partial or (_OWN_NAME.fullmatch(file.name) and file.name not in kept):
                file.unlink()


class SharedMemory(Directory):
    """The memory of this host under ``name``: a `Directory` in a file system in memory.

    Only changed elements are gathered. Receivers map the files (`read_published`), without a copy,
    and keep their version until they read the next one. Call `remove` at the end.
    """

    accepts_runs = True
    _syncs = False

    def __init__(self, name: str) -> None:
        super().__init__(Path("/dev/shm") / f"shardwise-{name}")

    def remove(self) -> None:
        """Delete all files; receivers keep what they have mapped."""
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class Published:
    """A version that was read: its tensors by name, mapped from files; writes stay private."""

    version: int
    tensors: dict[str, Tensor]


def read_published(source: str | os.PathLike[str] | Directory) -> Published:
    """Map the current version of a directory, or of a `SharedMemory`.

    Raises:
        CheckpointNotFound: nothing was published there.
    """
    path = source.path if isinstance(source, Directory) else Path(source)
    while True:
        version, files = _read_index(path)
        if not version:
            raise CheckpointNotFound(f"{path}: nothing was published here")
        try:
            return Published(version, dict(_map_tensor(path / file) for file in files.values()))
        except FileNotFoundError:
            if _read_index(path)[0] == version:  # not replaced by the next version
                raise


def _read_index(path: Path) -> tuple[int, dict[str, str]]:
    """The current version and its files by tensor; 0 if there is none."""
    try:
        found = parse_json((path / INDEX).read_bytes())
        return int(found["metadata"]["version"]), dict(found["weight_map"])
    except FileNotFoundError:
        return 0, {}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / INDEX}: sw.publish has not written this file; choose another directory"
        ) from error


def _map_tensor(file: Path) -> tuple[str, Tensor]:
    """The name and the tensor of a file with a single one, mapped without a copy."""
    num_bytes = file.stat().st_size
    try:
        content = torch.from_file(str(file), shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError:
        if file.exists():
            raise
        raise FileNotFoundError(file) from None
    length = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
    begin = _LENGTH_BYTES + length
    header = content[_LENGTH_BYTES:begin].numpy().tobytes()
    [(spec, _)] = parse_header(str(file), header, num_bytes - begin).values()
    return spec.name, content[begin:].view(spec.torch_dtype).view(spec.shape)


def _partial(path: Path) -> Path:
    """Where a file is written; the name does not end in .safetensors."""
    return path.with_name(f".{path.name}.partial")
