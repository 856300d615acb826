"""verl's FSDP engine trains, sends weights and resumes with shardwise in place of FSDP2.

verl is not a dependency of the tests, because it needs packages that most machines lack: install it
(``pip install verl``, release 0.9) to run this. `verl_run` says what is replaced to run on a CPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun

pytest.importorskip("verl", reason="verl is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

OPTIONS = ("", "bf16 checkpointing", "offload", "lora", "lora merge bf16", "hsdp bf16")


@pytest.mark.parametrize("options", OPTIONS)
def test_every_digit_is_that_of_fsdp2(tmp_path: Path, options: str) -> None:
    ranks = 4 if "hsdp" in options else 2
    found: dict[str, list[Any]] = {}
    for engine in ("torch", "shardwise"):
        directory = tmp_path / engine
        directory.mkdir()
        torchrun(ranks, "-m", "tests.fsdp.verl_run", engine, str(directory), *options.split())
        files = [directory / f"{rank}.json" for rank in range(ranks)]
        found[engine] = [json.loads(file.read_text()) for file in files]
    assert found["shardwise"] == found["torch"]
    for rank in found["shardwise"]:
        assert rank["resumed"] == rank["continued"]
        assert len(rank["steps"]) == 3
