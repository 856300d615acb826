"""`examine`: every byte of a checkpoint against its checksums, without a process group."""

import contextlib
import os
from collections.abc import Iterator

from shardwise.checkpoint.crc import blocks, crc32
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.sources import file_problems, open_component, read_manifest
from shardwise.checkpoint.storage import Folder
from shardwise.errors import CheckpointError

__all__ = ["examine"]


def examine(path: str | os.PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint at ``path``, a line each; empty if nothing is.

    Reads all of it, a block at a time. Files that are missing, cut short or foreign, and damaged
    tensors, are named.
    """
    try:
        folder = folder_at(path)
        manifest = read_manifest(folder)
        problems = list(file_problems(folder, manifest))
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return [*problems, *_tensor_problems(folder, manifest)]


def _tensor_problems(folder: Folder, manifest: Manifest) -> Iterator[str]:
    for name, component in manifest.components.items():
        with contextlib.closing(open_component(folder, component)) as places:
            for key, spec in component.specs.items():
                try:
                    for number, (start, stop) in enumerate(blocks(0, spec.num_bytes)):
                        content = memoryview(bytearray(stop - start))
                        places.read(key, start, content)
                        if crc32(content) != manifest.sums[name][key][number]:
                            yield f"{key} of {name}: bytes {start} to {stop} are damaged"
                except (CheckpointError, OSError) as error:
                    yield f"{key} of {name}: cannot be read: {error}"
