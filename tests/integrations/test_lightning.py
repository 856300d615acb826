"""Lightning's `Trainer` and Fabric with our strategies train as with DDP, save and resume.

Lightning is not a dependency of the tests: ``pip install lightning`` to run this.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchrun import torchrun

pytest.importorskip("lightning", reason="lightning is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "lightning"


def run(script: str, out: Path, engine: str) -> Any:
    torchrun(2, str(EXAMPLES / script), str(out), "--engine", engine)
    return json.loads((out / f"{engine}.json").read_text())


def test_trainer_has_the_losses_of_ddp_and_lightning_opens_its_checkpoint(tmp_path: Path) -> None:
    """Two epochs, and a third that resumes from the second's checkpoint."""
    ours, ddp = (run("fit.py", tmp_path, engine) for engine in ("shardwise", "ddp"))
    assert len(ours) == 3 * 7
    assert ours == pytest.approx(ddp, rel=1e-4)
    checkpoint = tmp_path / "shardwise" / "last.ckpt"
    consolidate = ["-m", "lightning.fabric.utilities.consolidate_checkpoint", str(checkpoint)]
    subprocess.run([sys.executable, *consolidate], check=True, capture_output=True)
    kind = runpy.run_path(str(EXAMPLES / "fit.py"))["Regression"]
    opened = kind.load_from_checkpoint(f"{checkpoint}.consolidated", map_location="cpu")
    expected = kind.load_from_checkpoint(tmp_path / "ddp" / "last.ckpt", map_location="cpu")
    for one, other in zip(opened.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_fabric_has_the_losses_and_norms_of_ddp(tmp_path: Path) -> None:
    ours, ddp = (run("fabric.py", tmp_path, engine) for engine in ("shardwise", "ddp"))
    assert len(ours) == 6
    for one, expected in zip(ours, ddp, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)


def test_runs_with_what_strategies_may_lose(tmp_path: Path) -> None:
    """States of unused parameters, averages, plugins, optimizers that step in `training_step`."""
    torchrun(2, str(Path(__file__).with_name("lightning_runs.py")), str(tmp_path))
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert runs["ours"] == pytest.approx(runs["ddp"], rel=1e-5)
    assert runs["resumed"] == pytest.approx(runs["ours"][4:], rel=1e-5)
    assert runs["from ddp"] == pytest.approx(runs["resumed"], rel=1e-5)
    for name in ("average", "swa", "partial"):
        for numbers, expected in zip(runs[name], runs[f"{name} ddp"], strict=True):
            assert numbers == pytest.approx(expected, rel=1e-4)
    _, before, after, average, loaded, epoch, others = runs["fabric"]
    assert (after, loaded, epoch) == pytest.approx((before, average, 3), rel=1e-6)
    assert others == pytest.approx(average, rel=1e-6)
    assert runs["plugin"][0] != pytest.approx(runs["ours"][0], rel=1e-2)
    assert runs["manual"] == pytest.approx(runs["manual ddp"], rel=1e-5)
    assert runs["manual replicas"] == pytest.approx(runs["manual ddp"], rel=1e-5)
    assert runs["refused"].startswith(
        "generator.0.bias, generator.0.weight, generator.2.bias, ...: an optimizer has stepped"
    )
    assert "an optimizer has stepped in this training_step" in runs["refused"]
