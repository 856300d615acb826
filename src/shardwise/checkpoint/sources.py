"""Where tensors are read from: files of a checkpoint, and directories of Hugging Face."""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.checkpoint.directory import MARKER
from shardwise.checkpoint.files import Spec, parse_header
from shardwise.checkpoint.manifest import MANIFEST, Component, Manifest
from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = [
    "Place",
    "Places",
    "Source",
    "check_files",
    "file_problems",
    "open_component",
    "open_hf",
    "read_manifest",
]

_MAX_HEADER_BYTES = 100_000_000  # that of the safetensors library


class Source(Protocol):
    """Tensors by name, of which any bytes can be read."""

    specs: Mapping[str, Spec]

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor from ``start`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    path: Path
    offset: int


class Places:
    """Tensors in safetensors files."""

    def __init__(self, specs: Mapping[str, Spec], places: Mapping[str, Place]) -> None:
        self.specs = specs
        self._places = places
        self._descriptors: dict[Path, int] = {}
        self._files = contextlib.ExitStack()

    def read(self, name: str, start: int, into: memoryview) -> None:
        place = self._places[name]
        offset = place.offset + start
        while into.nbytes:
            count = os.preadv(self._open(place.path), [into], offset)
            if count == 0:
                raise CheckpointDamaged(f"{name}: {place.path} ends before it")
            into, offset = into[count:], offset + count

    def close(self) -> None:
        self._files.close()
        self._descriptors.clear()

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
            self._files.callback(os.close, self._descriptors[path])
        return self._descriptors[path]


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in ``path``.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: no checkpoint: {_what_instead(path)}")
    return Manifest.parse((path / MANIFEST).read_bytes(), str(path / MANIFEST))


def check_files(path: Path, manifest: Manifest) -> None:
    """Whether the files of a checkpoint are there, as long as they should be, and no others.

    Raises:
        CheckpointDamaged: names the file and a tensor of it.
    """
    problems = list(file_problems(path, manifest))
    if problems:
        raise CheckpointDamaged("\n".join(problems))


def file_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    for file in manifest.files:
        names = [spec.name for spec in file.specs]
        which = f"{names[0]} and {len(names) - 1} more tensors" if len(names) > 1 else names[0]
        head = _head(path / file.name, len(file.head), file.num_bytes)
        if isinstance(head, str):
            yield f"{path / file.name}: {head}; it has {which}"
        elif head != file.head:
            yield f"{path / file.name}: its header is damaged or foreign; it has {which}"
    for name, (size, crc) in manifest.others.items():
        head = _head(path / name, size, size)
        if isinstance(head, str):
            yield f"{path / name}: {head}"
        elif zlib.crc32(head) != crc:
            yield f"{path / name}: damaged or foreign"
    known = {MANIFEST, *manifest.file_names}
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for found in sorted(path.glob(pattern)):
            if found.name not in known:
                yield f"{found}: foreign: the manifest does not know it"


def open_component(path: Path, component: Component) -> Places:
    """The tensors of a part of a checkpoint in ``path``."""
    places = {
        name: Place(path / file.name, offset)
        for file in component.files
        for name, offset in file.offsets.items()
    }
    return Places(component.specs, places)


def open_hf(path: Path) -> Places:
    """The tensors of a Hugging Face checkpoint: a directory with safetensors, or one such file.

    Raises:
        CheckpointError: ``path`` is none.
    """
    specs: dict[str, Spec] = {}
    places: dict[str, Place] = {}
    for file in _hf_files(path):
        for name, (spec, offset) in _foreign_tensors(file).items():
            specs[name] = spec
            places[name] = Place(file, offset)
    return Places(specs, places)


def _hf_files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise CheckpointError(
        f"{path}: no Hugging Face checkpoint: expected model.safetensors, or several such files "
        "with a model.safetensors.index.json"
    )


def _foreign_tensors(path: Path) -> dict[str, tuple[Spec, int]]:
    """Of one file: each tensor and where it begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointDamaged(f"{path}: not a safetensors file")
        found = parse_header(str(path), file.read(length))
    size = path.stat().st_size
    for name, (spec, start) in found.items():
        if 8 + length + start + spec.num_bytes > size:
            raise CheckpointDamaged(f"{name}: {path} ends before it")
    return {name: (spec, 8 + length + start) for name, (spec, start) in found.items()}


def _head(path: Path, num_bytes: int, size: int) -> bytes | str:
    """The first bytes of a file of ``size``, or what is wrong with it."""
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                return f"{actual} bytes long, expected {size}"
            return file.read(num_bytes)
    except FileNotFoundError:
        return "missing"


def _what_instead(path: Path) -> str:
    if not path.is_dir():
        return "no such directory"
    if (path / MARKER).exists():
        return "the remains of a save that did not end; take an earlier one (sw.latest)"
    inside = [str(p) for p in sorted(path.iterdir()) if (p / MANIFEST).is_file()]
    if inside:
        return f"there are some inside it, such as {inside[-1]} (sw.latest)"
    if any(path.glob("*.safetensors")):
        return f"{MANIFEST} is missing; for weights alone, unchecked, pass source='hf'"
    return f"{MANIFEST} is missing"
