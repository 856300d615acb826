"""Checkpoints of other programs are read without executing anything that they contain."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import shardwise as sw
from shardwise.checkpoint.unpickling import METADATA, DataReader
from shardwise.integrations.state import load_optimizers, save_optimizers


class Calling:
    """Calls ``function`` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _distributed(path: Path, **more: Any) -> nn.Linear:
    model = nn.Linear(2, 3)
    save_distributed({**model.state_dict(), **more}, checkpoint_id=path, no_dist=True)
    return model


def _functions(mark: Path) -> dict[str, Any]:
    return {
        "os": Calling(os.mkdir, str(mark)),
        "builtins": Calling(eval, f"__import__('os').mkdir({str(mark)!r})"),
        "getattr": Calling(getattr, "", "join"),
        "a function of torch": Calling(torch.save, [], str(mark)),
        "a method of an allowed class": Calling(FileSystemReader, str(mark)),
        "a class of this program": Calling(Calling, print),
    }


NAMES = list(_functions(Path()))


@pytest.mark.parametrize("place", ["whole", "planner data", "storage data"])
@pytest.mark.parametrize("name", NAMES)
def test_metadata_call_nothing(name: str, place: str, tmp_path: Path) -> None:
    path, mark = tmp_path / "x", tmp_path / "mark"
    model = _distributed(path)
    metadata = FileSystemReader(path).read_metadata()
    evil = _functions(mark)[name]
    if place == "planner data":
        metadata.planner_data = {**metadata.planner_data, "x": evil}
    elif place == "storage data":
        metadata.storage_data = evil
    (path / METADATA).write_bytes(pickle.dumps(evil if place == "whole" else metadata))
    before = model.weight.detach().clone()
    with pytest.raises(sw.CheckpointDamaged, match=r"x/\.metadata: not metadata of .*it names"):
        sw.load(path, model=model, source="dcp")
    assert not mark.exists()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch mark'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x0chub.os.mkdir\x93.",  # a dotted name
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x02os\x93.",
        b"(lp0\n.",
        b"\x80\x04K\x01Q.",  # a persistent id
        b"\x80\x04\x82\x01.",  # a number from copyreg's registry
        b"",
        b"noise",
    ],
)
def test_other_pickles_are_refused(content: bytes, tmp_path: Path) -> None:
    model = _distributed(tmp_path / "x")
    (tmp_path / "x" / METADATA).write_bytes(content)
    with pytest.raises(sw.CheckpointDamaged, match=r"\.metadata: not metadata"):
        sw.load(tmp_path / "x", model=model, source="dcp")


def test_values_call_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    model = _distributed(tmp_path / "x", extra=Calling(os.mkdir, str(mark)))
    with pytest.raises(sw.CheckpointDamaged, match="extra: cannot be read"):
        sw.load(tmp_path / "x", model=model, source="dcp")
    assert not mark.exists()
    torch.save({"model": model.state_dict(), "x": Calling(os.mkdir, str(mark))}, tmp_path / "y")
    with pytest.raises(sw.CheckpointError, match="y: not a state dict of torch"):
        sw.load(tmp_path / "y", model=model, source="torch")
    assert not mark.exists()


@pytest.mark.parametrize("where", ["metadata", "a value"])
def test_optimizer_states_of_frameworks_call_nothing(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    save_optimizers(tmp_path / "x", model, [optimizer])
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_optimizers(tmp_path / "x", model, [other])
    assert other.param_groups[0]["lr"] == 0.5
    if where == "metadata":
        (tmp_path / "x" / METADATA).write_bytes(pickle.dumps(Calling(os.mkdir, str(mark))))
    else:
        optimizer.param_groups[0]["lr"] = Calling(os.mkdir, str(mark))
        save_optimizers(tmp_path / "x", model, [optimizer])
    with pytest.raises(sw.CheckpointDamaged, match=r"\.metadata: not metadata|lr: cannot be read"):
        load_optimizers(tmp_path / "x", model, [other])
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside"])
def test_metadata_name_files_of_the_directory_only(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    model = _distributed(path)
    metadata = FileSystemReader(path).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = name
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(sw.CheckpointDamaged, match="outside the directory"):
        sw.load(path, model=model, source="dcp")


def test_all_that_torch_writes_is_read(tmp_path: Path) -> None:
    """Every dtype and memory format, a path as the id, and each version of pickle's protocol."""
    dtypes = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    size, chunks = torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    _distributed(tmp_path / "x", nested={"a": [1, (2, "b")], 3: None})
    written = FileSystemReader(tmp_path / "x").read_metadata()
    for number, dtype in enumerate(dtypes):
        kind = TensorProperties(dtype, memory_format=formats[number % 3])
        written.state_dict_metadata[str(dtype)] = TensorStorageMetadata(kind, size, chunks)
    assert written.storage_meta is not None
    written.storage_meta.checkpoint_id = tmp_path / "x"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps(written, protocol)
        if protocol == 3:  # Python 3.13's name of the class
            content = content.replace(b"cpathlib\n", b"cpathlib._local\n")
        (tmp_path / "x" / METADATA).write_bytes(content)
        read = DataReader(tmp_path / "x").read_metadata()
        assert isinstance(read, Metadata)
        assert read.state_dict_metadata == written.state_dict_metadata
        assert read.storage_data == written.storage_data
        assert read.planner_data == written.planner_data
        assert str(read.storage_meta.checkpoint_id) == str(tmp_path / "x")  # type: ignore[union-attr]
