"""Open checkpoints and read tensors from them, checking every byte."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.checksums import (
    BLOCK_BYTES,
    BlockPart,
    block_parts,
    block_sums,
    by_tensor,
    crc32,
    split_at_blocks,
)
from shardwise.checkpoint.directory import MARKER, checkpoint_files, complete, is_complete
from shardwise.checkpoint.format import Spec, is_plain_file_name, parse_header, parse_json
from shardwise.checkpoint.manifest import MANIFEST, Component, Manifest, tensor_ids
from shardwise.checkpoint.slices import TensorSlice, bytes_of
from shardwise.checkpoint.stores import MAX_OPEN_FILES, Folder, ReadInto
from shardwise.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound

__all__ = [
    "OpenCheckpoint",
    "OpenComponent",
    "Reader",
    "Source",
    "file_problems",
    "open_checkpoint",
    "open_component",
    "open_hf",
    "read_manifest",
]

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


# -- opening -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenComponent:
    """A component of a checkpoint, and the reader of its tensors.

    ``origin`` is the path or URL of the file that contains ``tree``, and ``problem`` says why the
    component cannot be loaded.
    """

    kind: str
    reader: "Reader"
    tree: Any = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    problem: str = ""

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self.reader.source.specs


@dataclass(frozen=True)
class OpenCheckpoint:
    """The components by name. Up to ``num_readers`` threads may read different tensors at once."""

    components: Mapping[str, OpenComponent]
    num_readers: int = 1

    @property
    def bytes_read(self) -> int:
        return sum(component.reader.bytes_read for component in self.components.values())

    @property
    def unchecked(self) -> list[BlockPart]:
        """Checksums of partially read blocks, which this rank cannot check alone."""
        return [part for component in self.components.values() for part in component.reader.parts]

    def check(self, parts: Iterable[BlockPart]) -> None:
        """Check the blocks that ranks have each read in part, from the ``unchecked`` of all."""
        of_tensors = by_tensor(parts)
        for component in self.components.values():
            component.reader.check(of_tensors)


def open_checkpoint(folder: Folder, cleanup: contextlib.ExitStack) -> OpenCheckpoint:
    """Open the checkpoint in ``folder``; its files stay open until ``cleanup`` ends.

    Raise a CheckpointDamaged if a file differs from its description in the manifest.
    """
    manifest = read_manifest(folder)
    problems = list(file_problems(folder, manifest))
    if problems:
        raise CheckpointDamaged("\n".join(problems))
    ids = tensor_ids(manifest.components)
    components = {}
    for name, component in manifest.components.items():
        source = cleanup.enter_context(contextlib.closing(open_component(folder, component)))
        own_ids = {key: ids[name, key] for key in component.specs}
        reader = Reader(source, manifest.sums[name], own_ids)
        components[name] = OpenComponent(
            component.kind, reader, component.tree, component.aliases, str(folder / MANIFEST)
        )
    return OpenCheckpoint(components, folder.num_readers)


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint; a CheckpointError states what the folder contains instead."""
    if not is_complete(folder):
        kind = CheckpointError if folder.exists() else CheckpointNotFound
        raise kind(f"{folder}: not a checkpoint: {_found_instead(folder)}")
    return Manifest.parse(folder.read(MANIFEST), str(folder / MANIFEST))


def file_problems(folder: Folder, manifest: Manifest) -> Iterator[str]:
    """Describe wrong sizes, headers and files of a checkpoint; tensors are not read."""
    sizes = folder.sizes()
    for file in manifest.files:
        names = [spec.name for spec in file.specs]
        which = f"{names[0]} and {len(names) - 1} more tensors" if len(names) > 1 else names[0]
        head = _head(folder, file.name, len(file.head), sizes.get(file.name), file.num_bytes)
        if isinstance(head, str):
            yield f"{folder / file.name}: {head}; it contains {which}"
        elif head != file.head:
            yield f"{folder / file.name}: its header is damaged or foreign; it contains {which}"
    for name, (size, crc) in manifest.others.items():
        head = _head(folder, name, size, sizes.get(name), size)
        if isinstance(head, str):
            yield f"{folder / name}: {head}"
        elif crc32(head) != crc:
            yield f"{folder / name}: damaged or foreign"
    known = {MANIFEST, *(file.name for file in manifest.files), *manifest.others}
    for name in checkpoint_files(folder):
        if name not in known:
            yield f"{folder / name}: foreign: the manifest does not list it"


def _head(
    folder: Folder, name: str, num_bytes: int, size: int | None, expected: int
) -> bytes | str:
    """The first bytes of a file, or a description of what is wrong with its size."""
    if size is None:
        return "missing"
    if size != expected:
        return f"{size} bytes long, expected {expected}"
    return folder.read(name, num_bytes)


def _found_instead(folder: Folder) -> str:
    if not folder.exists():
        return "no such directory"
    if folder.has(MARKER):
        return "a save that is unfinished or was killed; load an earlier one (sw.latest)"
    for parent in (folder, folder / "checkpoints"):  # the latter if it is a run directory
        inside = [str(found) for found in complete(parent)]
        if inside:
            return f"it contains checkpoints, such as {inside[-1]} (sw.latest)"
    if checkpoint_files(folder):
        return f"{MANIFEST} is missing; pass source='hf' to load the weights without checksums"
    return f"{MANIFEST} is missing"


# -- sources -------------------------------------------------------------------------------------


class Source(Protocol):
    """A source of tensors by name, from which any bytes can be read."""

    specs: Mapping[str, Spec]
    read_bytes: int  # bytes to read at once: whole blocks, or equal parts of one

    def read(self, name: str, start: int, content: memoryview) -> None:
        """Fill ``content`` with the bytes of a tensor from ``start`` on."""
        ...


class SafetensorsSource:
    """Tensors in the safetensors files of a folder."""

    def __init__(
        self, folder: Folder, specs: Mapping[str, Spec], locations: Mapping[str, tuple[str, int]]
    ) -> None:
        """``locations`` gives each tensor's file and its offset in the file."""
        self.specs = specs
        self.read_bytes = folder.read_bytes
        self._folder = folder
        self._locations = locations
        self._files: dict[str, ReadInto] = {}
        self._cleanup = contextlib.ExitStack()

    def read(self, name: str, start: int, content: memoryview) -> None:
        file, offset = self._locations[name]
        read_into = self._files.get(file) or self._open(file)
        if not read_into(content, offset + start):
            raise CheckpointDamaged(f"{name}: {self._folder / file} ends before this tensor does")

    def close(self) -> None:
        self._files.clear()
        self._cleanup.close()

    def _open(self, file: str) -> ReadInto:
        # No thread reads the files that are closed: folders that hold files open have one reader.
        if len(self._files) >= MAX_OPEN_FILES:
            self.close()
        self._files[file] = read_into = self._folder.open(file, self._cleanup)
        return read_into


def open_component(folder: Folder, component: Component) -> SafetensorsSource:
    locations = {
        name: (file.name, offset)
        for file in component.files
        for name, offset in file.offsets.items()
    }
    return SafetensorsSource(folder, component.specs, locations)


def open_hf(place: Folder) -> SafetensorsSource:
    """The tensors of a Hugging Face checkpoint: a safetensors file or a directory of them."""
    is_file = place.parent.has(place.name)
    folder = place.parent if is_file else place
    specs: dict[str, Spec] = {}
    locations: dict[str, tuple[str, int]] = {}
    for file in [place.name] if is_file else _hf_files(folder):
        for name, (spec, offset) in _tensors_in(folder, file).items():
            if name in specs:
                other = folder / locations[name][0]
                raise CheckpointDamaged(f"{folder / file}: {name} is also in {other}")
            specs[name] = spec
            locations[name] = (file, offset)
    return SafetensorsSource(folder, specs, locations)


def _hf_files(folder: Folder) -> list[str]:
    index = "model.safetensors.index.json"
    if folder.has(index):
        return _files_in_index(folder, index)
    if folder.has("model.safetensors"):
        return ["model.safetensors"]
    raise CheckpointError(
        f"{folder}: not a Hugging Face checkpoint: expected model.safetensors, or several such "
        f"files with a {index}"
    )


def _files_in_index(folder: Folder, index: str) -> list[str]:
    try:
        files = set(parse_json(folder.read(index))["weight_map"].values())
        if all(map(is_plain_file_name, files)):
            return sorted(files)
        reason = "weight_map names files outside the directory"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"expected a weight_map from names to files ({error})"
    raise CheckpointDamaged(f"{folder / index}: {reason}")


def _tensors_in(folder: Folder, file: str) -> dict[str, tuple[Spec, int]]:
    path = str(folder / file)
    length = int.from_bytes(folder.read(file, 8), "little")
    data_bytes = folder.sizes()[file] - 8 - length
    if length > _MAX_HEADER_BYTES or data_bytes < 0:
        raise CheckpointDamaged(f"{path}: not a safetensors file")
    found = parse_header(path, folder.read(file, 8 + length)[8:], data_bytes)
    return {name: (spec, 8 + length + start) for name, (spec, start) in found.items()}


# -- reading -------------------------------------------------------------------------------------


class Reader:
    """Reads slices of a source's tensors and compares them with the blocks' checksums.

    A block that this rank reads only in part must be checked together with the other ranks. `parts`
    collects the checksums of such parts for `OpenCheckpoint.check`.
    """

    def __init__(
        self,
        source: Source,
        sums: Mapping[str, Sequence[int]] | None = None,
        ids: Mapping[str, int] | None = None,
    ) -> None:
        """``sums`` are the checksums (None: check nothing), ``ids`` the numbers of the tensors."""
        self.source = source
        self.parts: list[BlockPart] = []
        self.bytes_read = 0
        self._sums = sums
        self._ids = ids or {}
        self._lock = threading.Lock()

    def read(self, name: str, target: TensorSlice) -> None:
        """Fill ``target`` with its elements of the tensor ``name``, converted to its dtype."""
        spec = self.source.specs[name]
        elements = target.elements
        start, stop = (n * spec.itemsize for n in (target.start, target.start + len(elements)))
        is_direct = elements.dtype is spec.torch_dtype and elements.device.type == "cpu"
        memory = bytes_of(elements) if is_direct else memoryview(b"")
        parts: list[BlockPart] = []
        for begin, end in split_at_blocks(start, stop, self.source.read_bytes):
            content = memory[begin - start : end - start]
            if not is_direct:
                size = (end - begin) // spec.itemsize
                converted = torch.empty(size, dtype=spec.torch_dtype, device="cpu")
                content = bytes_of(converted)
            self.source.read(name, begin, content)
            if self._sums is not None:
                parts += block_parts(self._ids[name], begin, content)
            if not is_direct:
                first = (begin - start) // spec.itemsize
                elements[first : first + len(converted)].copy_(converted)
        self.parts += self._check_whole_blocks(name, parts)
        with self._lock:
            self.bytes_read += stop - start

    def read_whole(self, name: str) -> Tensor:
        """Read the whole tensor ``name`` into a new tensor on the CPU."""
        spec = self.source.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
        self.read(name, TensorSlice(0, whole.view(-1)))
        return whole

    def are_equal(self, name: str, other: str) -> bool:
        """Compare two tensors by their checksums; without checksums, by the first bytes of each."""
        first, second = self.source.specs[name], self.source.specs[other]
        if (first.torch_dtype, first.shape) != (second.torch_dtype, second.shape):
            return False
        if self._sums is not None:
            return self._sums[name] == self._sums[other]
        contents = [bytearray(min(first.num_bytes, BLOCK_BYTES)) for _ in range(2)]
        for each, content in zip((name, other), contents, strict=True):
            self.source.read(each, 0, memoryview(content))
        return contents[0] == contents[1]

    def check(self, parts: Mapping[int, Sequence[BlockPart]]) -> None:
        """Check the blocks that several ranks have each read in part, by tensor number."""
        for name, number in self._ids.items():
            for part in self._check_whole_blocks(name, parts.get(number, ())):
                raise _damaged(name, part.block)  # replicas have read different bytes

    def _check_whole_blocks(self, name: str, parts: Sequence[BlockPart]) -> list[BlockPart]:
        """Compare the checksums of whole blocks; return the parts of incomplete ones."""
        if self._sums is None or not parts:
            return []
        found = block_sums(parts, self.source.specs[name].num_bytes)
        for number in sorted({part.block for part in parts}):
            if found[number] not in (None, self._sums[name][number]):
                raise _damaged(name, number)
        return [part for part in parts if found[part.block] is None]


def _damaged(name: str, block: int) -> CheckpointDamaged:
    start = block * BLOCK_BYTES
    return CheckpointDamaged(
        f"{name}: bytes {start} to {start + BLOCK_BYTES} differ from what was saved; run "
        "`shardwise doctor` to list all damage, and load an earlier checkpoint"
    )
