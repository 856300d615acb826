"""torchtitan trains with shardwise in place of FSDP2, and reports the same losses.

torchtitan is not a dependency of the tests, because it needs packages that most machines lack:
install it (``pip install torchtitan``, release 0.3) to run this. `torchtitan_run` lists the parts
that are replaced to run on a CPU. ``spmd_backend="spmd_types"`` needs a later torch: the FSDP2 of
torch 2.13 refuses its plain parameters, too.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


def losses(engine: str, directory: Path, *options: str, ranks: int = 4) -> Any:
    """Step, loss and gradient norm of each step of a run."""
    directory.mkdir(exist_ok=True)
    program = ["-m", "tests.fsdp.torchtitan_run", engine, str(directory), *options]
    last = "3" if any(option.startswith("pipeline") for option in options) else "0"
    torchrun(ranks, *program, LOGS=last)
    return json.loads((directory / "losses.json").read_text())


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["tensor_parallel_degree=2"],
        ["data_parallel_replicate_degree=2"],
        ["pipeline_parallel_degree=2", "pipeline_parallel_schedule=1F1B"],
    ],
    ids=["fsdp", "fsdp x tp", "hsdp", "fsdp x pp"],
)
def test_losses_are_those_of_fsdp2(tmp_path: Path, options: list[str]) -> None:
    expected = losses("torch", tmp_path / "torch", *options)
    found = losses("shardwise", tmp_path / "shardwise", *options)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    "option", ["compile=aot_eager", "compile=inductor", "spmd_backend=full_dtensor"]
)
def test_losses_of_two_ranks_are_those_of_fsdp2(tmp_path: Path, option: str) -> None:
    expected = losses("torch", tmp_path / "torch", option, ranks=2)
    found = losses("shardwise", tmp_path / "shardwise", option, ranks=2)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_distributed_checkpoints_are_resumed_by_either_engine(tmp_path: Path) -> None:
    first, rest = {}, {}
    for writer in ("torch", "shardwise"):
        first[writer] = losses(writer, tmp_path / writer, "checkpoint=yes", "steps=2", ranks=2)
        for reader in ("torch", "shardwise"):
            directory = tmp_path / f"{writer} to {reader}"
            shutil.copytree(tmp_path / writer, directory)
            rest[writer, reader] = losses(reader, directory, "checkpoint=yes", "steps=4", ranks=2)
    for found in first.values():
        assert [step for step, *_ in found] == [1, 2]
    expected = rest["torch", "torch"]
    assert [step for step, *_ in expected] == [3, 4]
    for found in rest.values():
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
