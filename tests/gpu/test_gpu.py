"""``python -m tests.gpu`` on a CPU: its checks hold there, so that they cannot rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.registry import CHECKPOINTS, Check
from tests.rank_process import REPOSITORY

SECONDS = 280.0  # far above the half minute that all checks take
# One of each section, and what else is particular to this package.
SOME = (
    "core imports", "collectives of the backend", "hfsdp, 2 ranks", "float8 gathers", "bfloat16",
    "one rank raises in backward", "Muon, 4", "fsdp, wires", "programs 0 of 4, 2",
    "GPT-175B, 1024", "cards:",
)  # fmt: skip


@pytest.mark.parametrize(
    "only", [SOME, pytest.param(("",), marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_checks_on_a_cpu(tmp_path: Path, only: tuple[str, ...]) -> None:
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--out", str(out), "--only", *only)
    rows = json.loads(out.read_text(encoding="utf-8"))["checks"]
    assert done.returncode == 0, ([row for row in rows if "errors" in row], done.stderr)
    verdicts = {row["verdict"] for row in rows}
    assert verdicts == {"ok", "skipped"}
    reason = next(
        line for line in done.stdout.splitlines() if line.startswith("Skipped, needs a GPU")
    )
    assert "cards: " in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = run()
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "no GPU found; --device cpu" in done.stdout


@pytest.mark.thorough
def test_checks_on_the_simulated_device() -> None:
    done = run("--device", "simulated", "--only", "hsdp", "offload", "one rank raises")
    assert done.returncode == 0, done.stdout + done.stderr


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_check_that_needs_a_missing_package_says_so() -> None:
    """Images in the field have torch and numpy only."""
    check = Check("one rank", "a name", print, modules=(*CHECKPOINTS, "no_such_package"))
    assert check.why_not("cuda", 1).endswith("no_such_package")
    assert check.why_not("cuda", 1).startswith("needs ")
    cards = Check("cards", "a name", print, ranks=4, kinds=("cuda",))
    assert cards.why_not("cuda", 2) == "needs 4 cards, and there are 2"
    assert cards.why_not("cpu", 0) == "needs a GPU"
