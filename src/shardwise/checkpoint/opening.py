"""A checkpoint, opened for reading: its components, each with its tensors."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint import crc
from shardwise.checkpoint.files import Spec
from shardwise.checkpoint.manifest import tensor_ids
from shardwise.checkpoint.reader import Reader, check_parts
from shardwise.checkpoint.sources import check_files, open_component, read_manifest
from shardwise.checkpoint.storage import Folder

__all__ = ["Opened", "Part", "open_checkpoint"]


@dataclass(frozen=True)
class Part:
    """A component, and what reads its tensors."""

    kind: str
    reader: Reader
    tree: Any = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self.reader.source.specs


@dataclass(frozen=True)
class Opened:
    """The components by name; ``blocks`` are what `check_parts` wants to know.

    Tensors may be read by ``num_readers`` threads, each another one.
    """

    parts: Mapping[str, Part]
    blocks: Mapping[int, tuple[str, int, Sequence[int]]] = field(default_factory=dict)
    num_readers: int = 1

    @property
    def bytes_read(self) -> int:
        return sum(part.reader.bytes_read for part in self.parts.values())

    @property
    def unchecked(self) -> list[crc.Part]:
        """Parts of blocks that other ranks have read the rest of."""
        return [one for part in self.parts.values() for one in part.reader.parts]

    def check(self, parts: Sequence[crc.Part]) -> None:
        """Check the blocks that were read by several ranks; ``parts`` are those of all.

        Raises:
            CheckpointDamaged: names the tensor.
        """
        check_parts(parts, self.blocks)


def open_checkpoint(folder: Folder, cleanup: contextlib.ExitStack) -> Opened:
    """Open the checkpoint in ``folder``; files stay open until ``cleanup`` ends.

    Raises:
        CheckpointError: there is none.
        CheckpointDamaged: a file is not as the manifest says.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    numbered = tensor_ids(manifest.components)
    parts = {}
    blocks: dict[int, tuple[str, int, Sequence[int]]] = {}
    for name, component in manifest.components.items():
        places = cleanup.enter_context(contextlib.closing(open_component(folder, component)))
        own = {key: numbered[name, key] for key in component.specs}
        sums = manifest.sums[name]
        reader = Reader(places, sums, own)
        parts[name] = Part(component.kind, reader, component.tree, component.aliases)
        for key, spec in component.specs.items():
            blocks[own[key]] = key, spec.num_bytes, sums[key]
    return Opened(parts, blocks, folder.num_readers)
