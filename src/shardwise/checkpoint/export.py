"""`export`: a checkpoint as other programs want it, in one process and without a group."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from shardwise.checkpoint import tree
from shardwise.checkpoint.files import index_of, pack
from shardwise.checkpoint.opening import Part, open_checkpoint
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.save import MAX_FILE_BYTES
from shardwise.checkpoint.shares import bytes_of
from shardwise.errors import CheckpointError

__all__ = ["FORMATS", "export"]


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], format_: str = "hf") -> None:
    """Write the checkpoint in ``path`` to ``out``, which must not exist, in another format.

    Every byte is checked as it is read.

    Args:
        path: a complete checkpoint, or the URL of one.
        out: a directory for ``"hf"`` (the weights in safetensors, tied ones once; one tensor is in
            memory at a time) and ``"dcp"`` (``torch.distributed.checkpoint``: all components, by
            the names ``model``, ``optimizer``, ...); a file for ``"torch"`` (the same, for
            ``torch.load``). These two take the memory of the whole checkpoint.
        format_: one of these.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    if format_ not in FORMATS:
        raise CheckpointError(f"format {format_!r}: expected one of {', '.join(FORMATS)}")
    target = Path(out)
    if target.exists():
        raise CheckpointError(f"{target}: exists already; choose another path")
    with contextlib.ExitStack() as cleanup:
        opened = open_checkpoint(folder_at(path), cleanup)
        with _written(target) as partial:
            FORMATS[format_](dict(opened.parts), partial)


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Where to write what will be ``target``; nothing is left of it after an error."""
    partial = target.with_name(f"{target.name}.partial")
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


def _to_hf(parts: dict[str, Part], out: Path) -> None:
    part = parts.get("model")
    if part is None:
        raise CheckpointError("the checkpoint has no model")
    files = pack("model", part.specs.values(), MAX_FILE_BYTES)
    out.mkdir(parents=True)
    for file in files:
        with (out / file.name).open("wb") as stream:
            stream.write(file.head)
            for spec in file.specs:
                stream.write(bytes_of(part.reader.read_whole(spec.name).view(-1)))
    if len(files) > 1:
        (out / "model.safetensors.index.json").write_bytes(index_of(files))


def _to_torch(parts: dict[str, Part], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(_everything(parts), out)


def _to_dcp(parts: dict[str, Part], out: Path) -> None:
    save_distributed(_everything(parts), checkpoint_id=out, no_dist=True)


FORMATS: dict[str, Callable[[dict[str, Part], Path], None]] = {
    "hf": _to_hf,
    "dcp": _to_dcp,
    "torch": _to_torch,
}


def _everything(parts: dict[str, Part]) -> dict[str, Any]:
    """All components: modules as state dicts with every name of a tied tensor, others as saved."""
    return {name: _whole(part) for name, part in parts.items()}


def _whole(part: Part) -> Any:
    if part.kind != "module":
        return tree.decode(part.tree, part.reader.read_whole)
    tensors: dict[str, Tensor] = {name: part.reader.read_whole(name) for name in part.specs}
    return tensors | {alias: tensors[name] for alias, name in part.aliases.items()}
