"""Nothing is written through a symbolic link inside a checkpoint's directory."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import directory, write
from shardwise.checkpoint.directory import MARKER
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.offline import export
from shardwise.checkpoint.stores import Folder
from shardwise.errors import ConfigError
from tests.ranks import on_ranks

SMALL = 64  # bytes of a file, so that the model is split
FILES = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer.safetensors",
    "extra.safetensors",
    MANIFEST,
    MARKER,
)
KINDS = ("missing", "file", "directory")


def _target(outside: Path, kind: str) -> Path:
    """A path outside the checkpoint; if it exists, it has known content."""
    outside.mkdir(exist_ok=True)
    path = outside / kind
    if kind == "file":
        path.write_text("kept")
    elif kind == "directory":
        path.mkdir()
        (path / "file").write_text("kept")
    return path


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _content(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def _save(path: Path | str, *, wait: bool = True) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    sw.save(
        path,
        model=model,
        optimizer=optimizer,
        max_file_bytes=SMALL,
        extra={"x": torch.ones(3)},
        wait=wait,
    ).wait()


@pytest.mark.parametrize("url", ["", "file://"], ids=["path", "url"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_save_refuses_links(name: str, kind: str, url: str, tmp_path: Path) -> None:
    target = _target(tmp_path / "outside", kind)
    before = _content(tmp_path / "outside")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).symlink_to(target)
    is_taken = name == MANIFEST and kind == "file"  # as if it were complete
    expected = "contains a complete checkpoint" if is_taken else f"{name}: a symbolic link"
    for wait in (True, False):
        with pytest.raises(sw.CheckpointError, match=expected):
            _save(f"{url}{tmp_path / 'x'}", wait=wait)
    assert _names(tmp_path / "x") == [name], "the link was followed or removed"
    assert _content(tmp_path / "outside") == before
    (tmp_path / "x" / name).unlink()
    _save(f"{url}{tmp_path / 'x'}")


@on_ranks(2)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_link_that_appears_during_a_save_is_not_followed(name: str, tmp_path: Path) -> None:
    """The files are opened without following links, whatever was checked before."""
    prepare = directory.prepare

    def prepare_and_link(folder: Folder) -> directory.Owner:
        owner = prepare(folder)
        (tmp_path / "x" / name).symlink_to(tmp_path / "outside")
        return owner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "prepare", prepare_and_link)
        model = sw.fully_shard(nn.Linear(4, 5))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(sw.CheckpointError, match="symbolic link, through which nothing"):
            sw.save(tmp_path / "x", model=model, optimizer=optimizer)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("moment", ["create", "commit"])
def test_a_marker_that_is_replaced_by_a_link(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is written at the beginning, and the manifest in its place at the end."""
    outside = tmp_path / "outside"
    place = getattr(directory if moment == "create" else write, _CALLS[moment])

    def link_first(*arguments: object) -> object:
        if moment == "commit":
            outside.write_bytes((tmp_path / "x" / MARKER).read_bytes())  # names the same owner
            (tmp_path / "x" / MARKER).unlink()
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / MARKER).symlink_to(outside)
        return place(*arguments)

    monkeypatch.setattr(directory if moment == "create" else write, _CALLS[moment], link_first)
    with pytest.raises(sw.CheckpointError, match="symbolic link"):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3))
    if moment == "commit":
        assert b"token" in outside.read_bytes(), "the manifest was written through the link"
    else:
        assert not outside.exists()


_CALLS = {"create": "remove_remains", "commit": "commit"}


@pytest.mark.parametrize("url", ["", "file://"], ids=["path", "url"])
@pytest.mark.parametrize("kind", KINDS)
def test_latest_and_retention_do_not_follow_links(kind: str, url: str, tmp_path: Path) -> None:
    """Links in old checkpoints are removed with them, and their targets are kept."""
    target = _target(tmp_path / "outside", kind)
    before = _content(tmp_path / "outside")
    root = tmp_path / "root"
    for step in (1, 2):
        _save(root / f"step-{step}")
    for name in (MARKER, "more.safetensors", "notes"):
        (root / "step-1" / name).symlink_to(target)
    (root / "step-9").mkdir()  # no checkpoint, because its manifest is elsewhere
    (root / "step-9" / MANIFEST).symlink_to(_target(tmp_path / "other", "missing"))
    assert str(sw.latest(f"{url}{root}")).endswith("step-2")
    sw.save(f"{url}{root / 'step-3'}", model=nn.Linear(2, 3), retention=sw.Retention(last=1))
    assert _names(root) == ["step-3", "step-9"]
    assert _content(tmp_path / "outside") == before
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("format_", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_an_export_refuses_links(name: str, format_: str, tmp_path: Path) -> None:
    _save(tmp_path / "x")
    (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises((sw.CheckpointError, ConfigError), match=f"{name}: a"):
        export(tmp_path / "x", tmp_path / "out", format_)
    assert not (tmp_path / "outside").exists()


def test_a_linked_directory_and_linked_files_are_read(tmp_path: Path) -> None:
    """Caches of the Hugging Face hub consist of links; the manifest has the checksums."""
    model = nn.Linear(2, 3)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    sw.save(tmp_path / "run" / "step-1", model=model)
    assert (tmp_path / "disk" / "step-1" / MANIFEST).is_file()
    (tmp_path / "cache").mkdir()
    for file in (tmp_path / "disk" / "step-1").iterdir():
        (tmp_path / "cache" / file.name).symlink_to(file)
    other = nn.Linear(2, 3)
    sw.load(tmp_path / "cache", model=other)
    assert torch.equal(other.weight, model.weight)
