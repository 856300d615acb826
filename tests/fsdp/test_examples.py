"""The programs in `examples/porting` give the same losses with PyTorch's FSDP."""

import runpy
from pathlib import Path

import pytest

from tests.covering import leaving
from tests.fsdp.both import DEADLINE
from tests.ranks import run_on

PORTING = Path(__file__).parents[2] / "examples" / "porting"
NAMES = sorted(path.stem for path in PORTING.glob("*.py"))
OTHERS = ("by_hand", "digits", "meta", "t5")  # all but `orig_params`

TOLERANCE = 1e-5  # programs compute in float32 or bfloat16


def run(path: Path) -> list[float]:
    """The losses of a program, on one rank."""
    results: list[float] = runpy.run_path(str(path))["main"]()
    return results


@pytest.mark.parametrize("name", leaving(OTHERS, NAMES))
def test_other_imports_give_the_same_losses(name: str, tmp_path: Path) -> None:
    ported, original = PORTING / f"{name}.py", tmp_path / f"{name}.py"
    imports = ("from shardwise.fsdp", "from torch.distributed.fsdp")
    original.write_text(ported.read_text().replace(*imports))
    assert "shardwise" not in original.read_text()
    assert original.read_text() != ported.read_text()
    theirs, ours = (run_on(2, run, path, deadline=DEADLINE) for path in (original, ported))
    for rank in range(2):
        assert len(ours[rank]) > 2
        assert ours[rank] == pytest.approx(theirs[rank], rel=TOLERANCE), f"rank {rank}"
