"""Read directories of `torch.distributed.checkpoint` without executing what they contain.

torch unpickles ``.metadata`` and values that are not tensors, and a pickle can call any function.
Here, a pickle may only use the names that torch's own metadata consist of.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = ["METADATA", "DataReader"]

METADATA = ".metadata"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
# What torch 2.11 to 2.13 write, by module; dtypes are added in `find_class`.
_NAMES = {
    *(
        (_OF_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
# The path of the directory, as a path of any system; Python 3.13 moved the classes.
_PATHS: Mapping[str, type[PurePath]] = {
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": PureWindowsPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds metadata, and refuses every other class and function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _NAMES:
            return super().find_class(module_name, global_name)
        if module_name in ("pathlib", "pathlib._local") and global_name in _PATHS:
            return _PATHS[global_name]
        dtype = getattr(torch, global_name, None)
        if module_name == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}, which torch's metadata do not contain"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to another object: {pid!r:.100}")


class DataReader(FileSystemReader):
    """Reads a directory whose metadata are data only, and its files alone."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The content of ``.metadata``; a CheckpointDamaged if it is something else."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
            _check(metadata)
        except Exception as error:  # an unpickler raises anything
            raise CheckpointDamaged(
                f"{path}: not metadata of torch.distributed.checkpoint: {error}"
            ) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _check(metadata: object) -> None:
    """Raise a CheckpointError for something else than metadata, or a file outside the directory."""
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"it is a {type(metadata).__name__}")
    for index, stored in metadata.storage_data.items():
        path = PurePosixPath(stored.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{index.fqn} is in {path}, outside the directory")
