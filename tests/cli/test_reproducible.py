"""`shardwise train --set train.reproducible=8` gives one file on any number of ranks."""

import hashlib
from pathlib import Path

import pytest

from .commands import run

OPTIONS = ("train.reproducible=8", "train.global_batch=8", "train.steps=3", "sample.bytes=0")


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((4, 8), marks=pytest.mark.thorough)])
def test_the_exported_weights_have_the_same_bytes(
    tiny: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    assert len({_exported(tiny, tmp_path / str(size), size) for size in sizes}) == 1


def _exported(tiny: Path, directory: Path, size: int) -> str:
    directory.mkdir()
    settings = [part for option in OPTIONS for part in ("--set", option)]
    place = ["--set", f"run.directory={directory / 'run'}", "--nproc", str(size)]
    commands: list[list[str | Path]] = [
        ["train", tiny, *settings, *place],
        ["export", directory / "run" / "checkpoints" / "step-00000003", directory / "hf"],
    ]
    for arguments in commands:
        finished = run(arguments, directory)
        assert finished.code == 0, finished.stderr
    return hashlib.sha256((directory / "hf" / "model.safetensors").read_bytes()).hexdigest()
