"""TRL's SFTTrainer with LoRA logs the losses of DDP; peft opens the adapter.

Neither trl nor peft is a dependency of the tests: ``pip install trl peft`` to run this.
"""

import json
from pathlib import Path

import pytest

from tests.fsdp.torchrun import torchrun

pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def test_losses_are_those_of_ddp(tmp_path: Path) -> None:
    logs = {}
    for engine in ("ddp", "shardwise"):
        torchrun(2, "examples/hf/sft_lora.py", str(tmp_path), "--engine", engine)
        lines = json.loads((tmp_path / f"{engine}.json").read_text())
        logs[engine] = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    assert len(logs["ddp"]) == 6
    for ours, expected in zip(logs["shardwise"], logs["ddp"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (config.r, (tmp_path / "adapter" / "adapter_model.safetensors").exists()) == (4, True)
