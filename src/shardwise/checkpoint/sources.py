"""Where tensors are read from: files of a checkpoint, and directories of Hugging Face."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.checkpoint.crc import crc32
from shardwise.checkpoint.directory import MARKER, checkpoint_files, complete, is_complete
from shardwise.checkpoint.files import Spec, is_plain_file_name, parse_header
from shardwise.checkpoint.manifest import MANIFEST, Component, Manifest
from shardwise.checkpoint.storage import Folder, Reading
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
    read_bytes: int  # how much to read at once: whole blocks, or equal parts of one

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor from ``start`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    folder: Folder
    file: str
    offset: int

    def __str__(self) -> str:
        return str(self.folder / self.file)


class Places:
    """Tensors in safetensors files."""

    def __init__(
        self, specs: Mapping[str, Spec], places: Mapping[str, Place], read_bytes: int
    ) -> None:
        self.specs = specs
        self.read_bytes = read_bytes
        self._places = places
        self._files: dict[str, Reading] = {}

    def read(self, name: str, start: int, into: memoryview) -> None:
        place = self._places[name]
        if place.file not in self._files:
            self._files[place.file] = place.folder.open(place.file)
        if not self._files[place.file].fill(into, place.offset + start):
            raise CheckpointDamaged(f"{name}: {place} ends before it")

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    if not is_complete(folder):
        raise CheckpointError(f"{folder}: no checkpoint: {_what_instead(folder)}")
    return Manifest.parse(folder.read(MANIFEST), str(folder / MANIFEST))


def check_files(folder: Folder, manifest: Manifest) -> None:
    """Whether the files of a checkpoint are there, as long as they should be, and no others.

    Raises:
        CheckpointDamaged: names the file and a tensor of it.
    """
    problems = list(file_problems(folder, manifest))
    if problems:
        raise CheckpointDamaged("\n".join(problems))


def file_problems(folder: Folder, manifest: Manifest) -> Iterator[str]:
    sizes = folder.sizes()
    for file in manifest.files:
        names = [spec.name for spec in file.specs]
        which = f"{names[0]} and {len(names) - 1} more tensors" if len(names) > 1 else names[0]
        head = _head(folder, file.name, len(file.head), sizes.get(file.name), file.num_bytes)
        if isinstance(head, str):
            yield f"{folder / file.name}: {head}; it has {which}"
        elif head != file.head:
            yield f"{folder / file.name}: its header is damaged or foreign; it has {which}"
    for name, (size, crc) in manifest.others.items():
        head = _head(folder, name, size, sizes.get(name), size)
        if isinstance(head, str):
            yield f"{folder / name}: {head}"
        elif crc32(head) != crc:
            yield f"{folder / name}: damaged or foreign"
    known = {MANIFEST, *manifest.file_names}
    for name in checkpoint_files(folder):
        if name not in known:
            yield f"{folder / name}: foreign: the manifest does not know it"


def open_component(folder: Folder, component: Component) -> Places:
    """The tensors of a part of a checkpoint in ``folder``."""
    places = {
        name: Place(folder, file.name, offset)
        for file in component.files
        for name, offset in file.offsets.items()
    }
    return Places(component.specs, places, folder.read_bytes)


def open_hf(place: Folder) -> Places:
    """The tensors of a Hugging Face checkpoint: a directory with safetensors, or one such file.

    Raises:
        CheckpointError: ``place`` is none.
    """
    folder = place.parent if place.parent.has(place.name) else place
    specs: dict[str, Spec] = {}
    places: dict[str, Place] = {}
    for file in [place.name] if folder is not place else _hf_files(place):
        for name, (spec, offset) in _foreign_tensors(folder, file).items():
            specs[name] = spec
            places[name] = Place(folder, file, offset)
    return Places(specs, places, folder.read_bytes)


def _hf_files(folder: Folder) -> Sequence[str]:
    if folder.has("model.safetensors.index.json"):
        return _files_in_index(folder, "model.safetensors.index.json")
    if folder.has("model.safetensors"):
        return ["model.safetensors"]
    raise CheckpointError(
        f"{folder}: no Hugging Face checkpoint: expected model.safetensors, or several such files "
        "with a model.safetensors.index.json"
    )


def _files_in_index(folder: Folder, index: str) -> list[str]:
    try:
        files = set(json.loads(folder.read(index))["weight_map"].values())
        if all(map(is_plain_file_name, files)):
            return sorted(files)
        reason = "weight_map names files outside the directory"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"expected a weight_map from names to files ({error})"
    raise CheckpointDamaged(f"{folder / index}: {reason}")


def _foreign_tensors(folder: Folder, file: str) -> dict[str, tuple[Spec, int]]:
    """Of one file: each tensor and where it begins."""
    path = str(folder / file)
    length = int.from_bytes(folder.read(file, 8), "little")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointDamaged(f"{path}: not a safetensors file")
    found = parse_header(path, folder.read(file, 8 + length)[8:])
    size = folder.sizes()[file]
    for name, (spec, start) in found.items():
        if 8 + length + start + spec.num_bytes > size:
            raise CheckpointDamaged(f"{name}: {path} ends before it")
    return {name: (spec, 8 + length + start) for name, (spec, start) in found.items()}


def _head(
    folder: Folder, name: str, num_bytes: int, size: int | None, expected: int
) -> bytes | str:
    """The first bytes of a file, or what is wrong with its size."""
    if size is None:
        return "missing"
    if size != expected:
        return f"{size} bytes long, expected {expected}"
    return folder.read(name, num_bytes)


def _what_instead(folder: Folder) -> str:
    if not folder.exists():
        return "no such directory"
    if folder.has(MARKER):
        return "the remains of a save that did not end; take an earlier one (sw.latest)"
    inside = [str(found) for found in complete(folder)]
    if inside:
        return f"there are some inside it, such as {inside[-1]} (sw.latest)"
    if checkpoint_files(folder):
        return f"{MANIFEST} is missing; for weights alone, unchecked, pass source='hf'"
    return f"{MANIFEST} is missing"
