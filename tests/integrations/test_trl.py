"""TRL's trainers have the losses of DDP; SFT with (Q)LoRA saves and resumes for peft.

Neither trl nor bitsandbytes is a dependency of the tests: ``pip install trl bitsandbytes`` to run
this.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.torchrun import torchrun

pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def run(out: Path, script: str, *options: str, engine: str = "shardwise") -> Any:
    out.mkdir()
    torchrun(2, f"examples/hf/sft_{script}.py", str(out), "--engine", engine, *options)
    lines = json.loads((out / f"{engine}.json").read_text())
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("script", ["lora", "qlora"])
def test_losses_are_those_of_ddp_also_after_a_checkpoint(tmp_path: Path, script: str) -> None:
    """TRL converts the adapters of a quantized base to bfloat16, which is less precise."""
    if script == "qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    errors = {"lora": (1e-5, 1e-5, 1e-5), "qlora": (1e-4, 1e-2, 1e-2)}
    loss_error, norm_error, weight_error = errors[script]
    ddp = run(tmp_path / "ddp", script, engine="ddp")
    ours = run(tmp_path / "ours", script)
    checkpoint = tmp_path / "ours" / "trainer" / "checkpoint-4"
    resumed = run(tmp_path / "resumed", script, "--resume", str(checkpoint))
    assert len(ddp) == 8
    for found in (ours, resumed):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, ddp, strict=True):
            assert loss == pytest.approx(expected_loss, rel=loss_error)
            assert norm == pytest.approx(expected_norm, rel=norm_error)
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "ours" / "adapter"))
    assert config.r == 4
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("ours", "ddp")]
    adapter, expected_adapter = map(load_file, files)
    assert adapter.keys() == expected_adapter.keys()
    for name, tensor in expected_adapter.items():
        assert adapter[name].flatten().tolist() == pytest.approx(
            tensor.flatten().tolist(), rel=1e-3, abs=weight_error
        )


def test_other_trainers_have_the_numbers_and_weights_of_ddp(tmp_path: Path) -> None:
    torchrun(2, "tests/integrations/trl_runs.py", str(tmp_path))
    runs = torch.load(tmp_path / "runs.pt")
    assert len(runs) == 7
    for name, (ddp, ours) in runs.items():
        assert len(ddp["numbers"]) >= 4 * 8
        assert ours["numbers"] == pytest.approx(ddp["numbers"], rel=1e-4, abs=1e-5), name
        assert ours["weights"].keys() == ddp["weights"].keys()
        for parameter, expected in ddp["weights"].items():
            found, where = ours["weights"][parameter], f"{name}: {parameter}"
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=where)
