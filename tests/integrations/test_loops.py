"""Plain loops, one with torchdata's StatefulDataLoader, are resumed and have the losses of DDP.

torchdata is not a dependency of the tests: ``pip install torchdata`` to run its part.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.torchrun import torchrun

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def run(script: str, out: Path, engine: str, steps: int) -> Any:
    program = [f"examples/loops/{script}", str(out), "--engine", engine, "--steps", str(steps)]
    torchrun(2, *program)
    return json.loads((out / f"{engine}-{steps}.json").read_text())


@pytest.mark.parametrize("script", ["pretrain.py", "titan.py"])
def test_a_resumed_loop_has_the_losses_of_ddp(tmp_path: Path, script: str) -> None:
    if script == "pretrain.py":
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    expected = run(script, tmp_path, "ddp", 6)
    ours = run(script, tmp_path, "shardwise", 3) + run(script, tmp_path, "shardwise", 6)
    assert len(ours) == 6
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    if script == "pretrain.py":
        trace = (tmp_path / "trace.json").read_text()
        for name in ("forward 1", "forward 2", "backward 1", "gather 2", "reduce 1"):
            assert f'"{name}"' in trace
        return
    weights = [whole_weights(tmp_path / f"{engine}-step-6") for engine in ("shardwise", "ddp")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        found, wanted = tensor, weights[1][name]
        if name.endswith("in_proj_bias"):
            # A bias of the keys does not change a softmax: Adam amplifies its rounding errors.
            (found, _, *more), (wanted, _, *others) = found.chunk(3), wanted.chunk(3)
            found, wanted = torch.cat([found, *more]), torch.cat([wanted, *others])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model that torch loads in one process."""
    dcp_to_torch_save(checkpoint, checkpoint / "whole.pt")
    weights: dict[str, torch.Tensor] = torch.load(checkpoint / "whole.pt")["model"]
    return weights
