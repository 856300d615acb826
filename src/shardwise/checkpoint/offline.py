"""Examine and export checkpoints in one process, without a process group."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from shardwise.checkpoint import tree
from shardwise.checkpoint.checksums import crc32, split_at_blocks
from shardwise.checkpoint.format import MAX_FILE_BYTES, Spec, index_of, pack
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.read import (
    OpenComponent,
    file_problems,
    open_checkpoint,
    open_component,
    read_manifest,
)
from shardwise.checkpoint.slices import bytes_of
from shardwise.checkpoint.stores import Folder, folder_at
from shardwise.errors import CheckpointError, CheckpointNotFound, ConfigError

__all__ = ["FORMATS", "examine", "export", "write_hf"]


def examine(path: str | os.PathLike[str]) -> list[str]:
    """Describe the damage to the checkpoint at ``path``, one line per problem; empty if undamaged.

    The whole checkpoint is read, one block at a time. The lines name damaged tensors, and files
    that are missing, truncated or not part of the checkpoint.

    Raises:
        CheckpointNotFound: there is no such directory.
    """
    try:
        folder = folder_at(path)
        manifest = read_manifest(folder)
        problems = list(file_problems(folder, manifest))
    except CheckpointNotFound:
        raise
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return [*problems, *_tensor_problems(folder, manifest)]


def _tensor_problems(folder: Folder, manifest: Manifest) -> Iterator[str]:
    for name, component in manifest.components.items():
        with contextlib.closing(open_component(folder, component)) as source:
            for key, spec in component.specs.items():
                try:
                    for number, (start, stop) in enumerate(split_at_blocks(0, spec.num_bytes)):
                        content = memoryview(bytearray(stop - start))
                        source.read(key, start, content)
                        if crc32(content) != manifest.sums[name][key][number]:
                            yield f"{key} of {name}: bytes {start} to {stop} are damaged"
                except (CheckpointError, OSError) as error:
                    yield f"{key} of {name}: cannot be read: {error}"


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], format_: str = "hf") -> None:
    """Convert a checkpoint to a format of other programs. Every byte is checked.

    Args:
        path: a complete checkpoint, or its URL.
        out: the path to write, which must not exist: a directory for ``"hf"`` (the weights in
            safetensors files; one tensor is in memory at a time) and for ``"dcp"``
            (``torch.distributed.checkpoint``), or a file for ``"torch"`` (``torch.load``). The
            last two contain all components by name (``model``, ``optimizer``, ...), and need
            memory for the whole checkpoint.
        format_: ``"hf"``, ``"dcp"`` or ``"torch"``.

    Raises:
        CheckpointError: the checkpoint cannot be read, or ``out`` cannot be written.
        ConfigError: the format is unknown, or ``out`` exists.
    """
    if format_ not in FORMATS:
        raise ConfigError(f"format {format_!r}: expected one of {', '.join(FORMATS)}")
    target = Path(out)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: already exists; choose another path")
    with contextlib.ExitStack() as cleanup:
        opened = open_checkpoint(folder_at(path), cleanup)
        with _created(target) as partial:
            FORMATS[format_](dict(opened.components), partial)


@contextlib.contextmanager
def _created(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to ``target``, or removed after an error."""
    partial = target.with_name(f"{target.name}.partial")
    if partial.is_symlink():
        raise CheckpointError(f"{partial}: a symbolic link, through which nothing is written")
    try:
        yield partial
        partial.rename(target)
    except BaseException as error:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target}: {error}") from error
        raise


def _to_hf(components: dict[str, OpenComponent], out: Path) -> None:
    model = components.get("model")
    if model is None:
        raise CheckpointError("the checkpoint contains no model")
    write_hf(model.specs.values(), model.reader.read_whole, out)


def write_hf(
    specs: Iterable[Spec], read: Callable[[str], Tensor], out: Path, name: str = "model"
) -> None:
    """Write tensors to safetensors files ``out``/``name``..., in a new directory, one at a time."""
    files = pack(name, specs, MAX_FILE_BYTES)
    out.mkdir(parents=True)
    for file in files:
        with (out / file.name).open("wb") as stream:
            stream.write(file.head)
            for spec in file.specs:
                stream.write(bytes_of(read(spec.name).view(-1)))
    if len(files) > 1:
        (out / f"{name}.safetensors.index.json").write_bytes(index_of(files))


def _to_torch(components: dict[str, OpenComponent], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: _state_dict(part) for name, part in components.items()}, out)


def _to_dcp(components: dict[str, OpenComponent], out: Path) -> None:
    state = {name: _state_dict(part) for name, part in components.items()}
    save_distributed(state, checkpoint_id=out, no_dist=True)


FORMATS: dict[str, Callable[[dict[str, OpenComponent], Path], None]] = {
    "hf": _to_hf,
    "dcp": _to_dcp,
    "torch": _to_torch,
}


def _state_dict(component: OpenComponent) -> Any:
    """The value of a component; of a module, its state dict with tied tensors under each name."""
    read = component.reader.read_whole
    if component.kind != "module":
        return tree.decode(component.tree, read)
    tensors: dict[str, Tensor] = {name: read(name) for name in component.specs}
    return tensors | {alias: tensors[name] for alias, name in component.aliases.items()}
