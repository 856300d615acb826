"""The manifest: a list of what a checkpoint contains, with checksums."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shardwise.checkpoint import tree
from shardwise.checkpoint.checksums import BLOCK_BYTES, crc32
from shardwise.checkpoint.format import DTYPES, File, Spec, is_plain_file_name
from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = ["MANIFEST", "Component", "Manifest", "tensor_ids"]

MANIFEST = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True)
class Component:
    """A part of a checkpoint: the model, an optimizer or another value given to `save`."""

    kind: str  # "module", "optimizer", "object" (with a state_dict) or "data"
    tree: Any  # JSON that refers to tensors by name; see `tree`
    files: tuple[File, ...]
    aliases: Mapping[str, str]  # other names of tied tensors

    @cached_property
    def specs(self) -> dict[str, Spec]:
        return {spec.name: spec for file in self.files for spec in file.specs}


@dataclass(frozen=True)
class Manifest:
    """The components by name, and the checksums of each tensor's blocks by component and name.

    ``others`` gives the size and checksum of each file without tensors, such as the index.
    """

    components: Mapping[str, Component]
    sums: Mapping[str, Mapping[str, list[int]]]
    others: Mapping[str, tuple[int, int]]

    @property
    def files(self) -> list[File]:
        return [file for component in self.components.values() for file in component.files]

    def render(self) -> bytes:
        """The bytes of the manifest file, which depend only on the manifest's content."""
        body = {
            "format": "shardwise",
            "version": VERSION,
            "block_bytes": BLOCK_BYTES,
            "components": {name: self._component(name) for name in self.components},
            "others": {
                name: {"bytes": size, "crc32": _hex(crc)}
                for name, (size, crc) in self.others.items()
            },
        }
        return _seal(body)

    @staticmethod
    def parse(content: bytes, where: str) -> "Manifest":
        """Parse the result of `render`.

        Raise a CheckpointDamaged if ``content`` is malformed, a CheckpointError if another release
        wrote it.
        """
        try:
            body = json.loads(content)["manifest"]
            is_whole = _seal(body) == content
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamaged(f"{where}: not a manifest ({error})") from error
        if not is_whole:
            raise CheckpointDamaged(f"{where}: the manifest is damaged: its checksum differs")
        try:
            header = _Header.model_validate(body)
            if (header.version, header.block_bytes) != (VERSION, BLOCK_BYTES):
                raise CheckpointError(
                    f"{where}: written as version {header.version} with blocks of "
                    f"{header.block_bytes} bytes; this release reads version {VERSION} with "
                    f"{BLOCK_BYTES}; use the release that wrote it"
                )
            return _manifest(_Body.model_validate(body))
        except (ValidationError, ValueError, RecursionError) as error:
            reason = _first(error) if isinstance(error, ValidationError) else error
            raise CheckpointDamaged(f"{where}: malformed manifest: {reason}") from error

    def _component(self, name: str) -> dict[str, Any]:
        part, sums = self.components[name], self.sums[name]
        return {
            "kind": part.kind,
            "tree": part.tree,
            "aliases": dict(part.aliases),
            "files": {
                file.name: {
                    "bytes": file.num_bytes,
                    "head_crc32": _hex(crc32(file.head)),
                    # Lists, because the order of a file's tensors is that of their bytes.
                    "tensors": [
                        [spec.name, spec.dtype, spec.shape, " ".join(map(_hex, sums[spec.name]))]
                        for spec in file.specs
                    ],
                }
                for file in part.files
            },
        }


def tensor_ids(components: Mapping[str, Component]) -> dict[tuple[str, str], int]:
    """A number for each tensor, by component and name; the same on every rank."""
    keys = sorted((name, key) for name, part in components.items() for key in part.specs)
    return {key: number for number, key in enumerate(keys)}


# -- the schema of the JSON ----------------------------------------------------------------------


def _check_file_name(name: str) -> str:
    if not is_plain_file_name(name):
        raise ValueError(f"{name!r} is not a file in the checkpoint's directory")
    return name


_Size = Annotated[int, Field(ge=0)]
_Crc = Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
_FileName = Annotated[str, AfterValidator(_check_file_name)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Header(_Strict):
    version: int
    block_bytes: int


class _FileEntry(_Strict):
    bytes: _Size
    head_crc32: _Crc
    # name, dtype, shape, checksums
    tensors: list[Annotated[tuple[str, str, list[_Size], str], Field(strict=False)]]


class _Component(_Strict):
    kind: Literal["module", "optimizer", "object", "data"]
    tree: Any
    aliases: dict[str, str]
    files: dict[_FileName, _FileEntry]


class _Other(_Strict):
    bytes: _Size
    crc32: _Crc


class _Body(_Strict):
    components: dict[str, _Component]
    others: dict[_FileName, _Other]


class _Group(BaseModel):
    params: list[str]


class _OptimizerTree(BaseModel):
    state: dict[str, dict[str, Any]]
    param_groups: list[_Group]
    other: dict[str, Any] = {}


_OPTIMIZERS = TypeAdapter(dict[str, _OptimizerTree])  # by component, so that errors name it


def _manifest(body: _Body) -> Manifest:
    """The Manifest that ``body`` describes; a ValueError if it contradicts itself."""
    sums: dict[str, dict[str, list[int]]] = {name: {} for name in body.components}
    return Manifest(
        {name: _component(name, part, sums[name]) for name, part in body.components.items()},
        sums,
        {name: (other.bytes, int(other.crc32, 16)) for name, other in body.others.items()},
    )


def _component(name: str, entry: _Component, sums: dict[str, list[int]]) -> Component:
    """The component that ``entry`` describes; adds the checksums of its tensors to ``sums``."""
    files = tuple(_file(file, tensors, sums) for file, tensors in entry.files.items())
    component = Component(entry.kind, entry.tree, files, entry.aliases)
    if entry.kind == "optimizer":
        _OPTIMIZERS.validate_python({name: entry.tree})
    for key in (*entry.aliases.values(), *tree.tensor_names(entry.tree, name)):
        if key not in component.specs:
            raise ValueError(f"{name}: none of its files contains {key}")
    return component


def _file(name: str, entry: _FileEntry, sums: dict[str, list[int]]) -> File:
    specs = []
    for key, dtype, shape, text in entry.tensors:
        if dtype not in DTYPES:
            raise ValueError(f"{name}: {key} has the unknown dtype {dtype}")
        if key in sums:
            raise ValueError(f"{name}: {key} is listed twice")
        specs.append(Spec(key, dtype, tuple(shape)))
        sums[key] = _parse_sums(specs[-1], text)
    file = File(name, tuple(specs))
    if file.num_bytes != entry.bytes:
        raise ValueError(f"{name}: bytes is {entry.bytes}, its tensors take {file.num_bytes}")
    if _hex(crc32(file.head)) != entry.head_crc32:
        raise ValueError(f"{name}: head_crc32 does not match its tensors' names and shapes")
    return file


def _parse_sums(spec: Spec, text: str) -> list[int]:
    found, num_blocks = text.split(), -(-spec.num_bytes // BLOCK_BYTES)
    if len(found) != num_blocks or not all(re.fullmatch("[0-9a-f]{8}", crc) for crc in found):
        raise ValueError(f"{spec.name}: expected {num_blocks} block checksums")
    return [int(crc, 16) for crc in found]


def _seal(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, indent=1)
    sealed = {"crc32": _hex(crc32(text.encode())), "manifest": body}
    return (json.dumps(sealed, sort_keys=True, indent=1) + "\n").encode()


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _first(error: ValidationError) -> str:
    """The first error that pydantic found, with its location."""
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
