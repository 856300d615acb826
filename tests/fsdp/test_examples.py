"""The two versions of each program in `examples/porting` differ in imports only."""

import runpy
from pathlib import Path

import pytest

from tests.covering import leaving
from tests.fsdp.both import DEADLINE
from tests.ranks import run_on

PORTING = Path(__file__).parents[2] / "examples" / "porting"
NAMES = sorted(path.stem for path in (PORTING / "torch").glob("*.py"))
OTHERS = ("by_hand", "digits", "meta", "t5")  # all but `orig_params`

TOLERANCE = 1e-5  # programs compute in float32 or bfloat16


def run(version: str, name: str) -> list[float]:
    """The losses of one version, on one rank."""
    results: list[float] = runpy.run_path(str(PORTING / version / f"{name}.py"))["main"]()
    return results


@pytest.mark.parametrize("name", NAMES)
def test_only_imports_differ(name: str) -> None:
    before, after = (
        (PORTING / version / f"{name}.py").read_text().replace(f"porting/{version}", "porting")
        for version in ("torch", "shardwise")
    )
    changed = [line for line in before.splitlines() if line not in after.splitlines()]
    assert changed
    assert all(line.startswith("from torch.distributed.fsdp") for line in changed)
    assert before.replace("torch.distributed.fsdp", "shardwise.fsdp") == after


@pytest.mark.parametrize("name", leaving(OTHERS, NAMES))
def test_both_versions_give_the_same_losses(name: str) -> None:
    theirs, ours = (
        run_on(2, run, version, name, deadline=DEADLINE) for version in ("torch", "shardwise")
    )
    for rank in range(2):
        assert len(ours[rank]) > 2
        assert ours[rank] == pytest.approx(theirs[rank], rel=TOLERANCE), f"rank {rank}"
