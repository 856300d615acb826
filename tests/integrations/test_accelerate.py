"""accelerate's `Accelerator` trains, saves and loads a sharded model as it does with DDP."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.torchrun import torchrun

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "accelerate_loop.py"
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def run(out: Path, engine: str, *options: str) -> Any:
    torchrun(2, str(SCRIPT), str(out), "--engine", engine, *options)
    return json.loads((out / f"{engine}.json").read_text())


def test_losses_and_norms_are_those_of_ddp_also_after_a_checkpoint(tmp_path: Path) -> None:
    ours, ddp = (run(tmp_path, engine) for engine in ("shardwise", "ddp"))
    assert len(ours) == 6
    for one, expected in zip(ours, ddp, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)
    module = runpy.run_path(str(SCRIPT))
    model = LlamaForCausalLM(LlamaConfig(**module["SIZES"], **module["HEADS"]))
    load_checkpoint_in_model(model, tmp_path / "shardwise" / "model")
    expected_weights = load_file(tmp_path / "ddp" / "model" / "model.safetensors")
    opened = model.state_dict()
    for name, expected_tensor in expected_weights.items():
        torch.testing.assert_close(opened[name], expected_tensor, rtol=1e-3, atol=1e-5)


def test_losses_in_bfloat16_are_near_those_of_ddp(tmp_path: Path) -> None:
    ours, ddp = (run(tmp_path, engine, "--bf16") for engine in ("shardwise", "ddp"))
    for (loss, _), (expected, _) in zip(ours, ddp, strict=True):
        assert loss == pytest.approx(expected, rel=1e-2)
