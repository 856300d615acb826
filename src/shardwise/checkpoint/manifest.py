"""The manifest: what a checkpoint consists of, and the checksums of it. Pure data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.checkpoint.crc import BLOCK_BYTES, crc32
from shardwise.checkpoint.files import File, Spec
from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = ["MANIFEST", "Component", "Manifest", "numbers"]

MANIFEST = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True)
class Component:
    """A part of a checkpoint: the model, an optimizer, or what else was named at `save`."""

    kind: str  # "module", "optimizer", "object" (with a state_dict) or "data"
    tree: Any  # JSON, with the names of its tensors; see `tree`
    files: tuple[File, ...]
    aliases: Mapping[str, str]  # other names of tied tensors

    @cached_property
    def specs(self) -> dict[str, Spec]:
        return {spec.name: spec for file in self.files for spec in file.specs}


@dataclass(frozen=True)
class Manifest:
    """All parts by name, and the checksum of every block of every tensor by part and name.

    ``others`` are whole files beside them: the bytes and the checksum of each.
    """

    components: Mapping[str, Component]
    sums: Mapping[str, Mapping[str, list[int]]]
    others: Mapping[str, tuple[int, int]]

    @property
    def file_names(self) -> list[str]:
        return [*(file.name for file in self.files), *self.others]

    @property
    def files(self) -> list[File]:
        return [file for part in self.components.values() for file in part.files]

    def render(self) -> bytes:
        """Its file: the same bytes for the same content."""
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
        """Read what `render` made.

        Raises:
            CheckpointDamaged: a byte of it is another one.
            CheckpointError: a later version wrote it.
        """
        try:
            body = json.loads(content)["manifest"]
            is_whole = _seal(body) == content
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{where}: not a manifest ({error})") from error
        if not is_whole:
            raise CheckpointDamaged(f"{where}: the manifest is damaged: its checksum differs")
        if body["version"] != VERSION or body["block_bytes"] != BLOCK_BYTES:
            raise CheckpointError(
                f"{where}: written as version {body['version']} with blocks of "
                f"{body['block_bytes']} bytes; this release reads version {VERSION} with "
                f"{BLOCK_BYTES}; use the release that wrote it"
            )
        parts = body["components"]
        return Manifest(
            {name: _component(part) for name, part in parts.items()},
            {name: _sums(part) for name, part in parts.items()},
            {name: (x["bytes"], int(x["crc32"], 16)) for name, x in body["others"].items()},
        )

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
                    # Lists, for the order of a file's tensors is that of their bytes.
                    "tensors": [
                        [spec.name, spec.dtype, spec.shape, " ".join(map(_hex, sums[spec.name]))]
                        for spec in file.specs
                    ],
                }
                for file in part.files
            },
        }


def numbers(components: Mapping[str, Component]) -> dict[tuple[str, str], int]:
    """A number for every tensor, by component and name; the same on every rank."""
    keys = sorted((name, key) for name, part in components.items() for key in part.specs)
    return {key: number for number, key in enumerate(keys)}


def _seal(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, indent=1)
    sealed = {"crc32": _hex(crc32(text.encode())), "manifest": body}
    return (json.dumps(sealed, sort_keys=True, indent=1) + "\n").encode()


def _component(part: Any) -> Component:
    files = tuple(
        File(name, tuple(Spec(key, dtype, tuple(shape)) for key, dtype, shape, _ in x["tensors"]))
        for name, x in part["files"].items()
    )
    return Component(part["kind"], part["tree"], files, part["aliases"])


def _sums(part: Any) -> dict[str, list[int]]:
    return {
        name: [int(crc, 16) for crc in sums.split()]
        for file in part["files"].values()
        for name, _, _, sums in file["tensors"]
    }


def _hex(crc: int) -> str:
    return f"{crc:08x}"
