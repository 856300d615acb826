"""Frameworks that shard models themselves train with shardwise as with PyTorch's FSDP.

Lightning is not a dependency of the tests: ``pip install lightning`` to run its part.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as torchs_module

import shardwise.fsdp
from shardwise.fsdp.frameworks import replace_torch_fsdp
from tests.torchrun import torchrun


def thorough(test: Any) -> Any:
    """Mark a test for `make thorough`, because its programs take seconds to start."""
    return pytest.mark.thorough(pytest.mark.timeout(600)(test))


def test_the_block_restores_torch() -> None:
    before = dict(vars(torch.distributed.fsdp))
    with replace_torch_fsdp():
        for name in ("FSDPModule", "FullyShardedDataParallel", "fully_shard"):
            assert getattr(torch.distributed.fsdp, name) is getattr(shardwise.fsdp, name)
        found = vars(torchs_module)["FullyShardedDataParallel"]
        assert found is shardwise.fsdp.FullyShardedDataParallel
        with replace_torch_fsdp():
            pass
        assert vars(torch.distributed.fsdp)["FSDPModule"] is shardwise.fsdp.FSDPModule
    assert dict(vars(torch.distributed.fsdp)) == before


def test_private_names_of_fsdp2_are_replaced() -> None:
    """NeMo finds sharded modules by the class in the private module, which differed in silence."""
    private = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    before = private.FSDPModule
    with replace_torch_fsdp():
        package = importlib.import_module("torch.distributed.fsdp._fully_shard")
        assert package.fully_shard is shardwise.fsdp.fully_shard
        assert private.FSDPModule is shardwise.fsdp.FSDPModule
        state = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state")
        sharded = nn.Sequential(nn.Linear(2, 2))
        shardwise.fsdp.fully_shard(sharded)
        assert state._get_module_fsdp_state(sharded) is not None
        assert state._get_module_fsdp_state(sharded[0]) is None
    assert private.FSDPModule is before


def test_the_block_restores_modules_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_framework.py").write_text("from torch.distributed.fsdp import FSDPModule\n")
    monkeypatch.syspath_prepend(tmp_path)
    with replace_torch_fsdp("late_framework"):
        framework = importlib.import_module("late_framework")
        assert vars(framework)["FSDPModule"] is shardwise.fsdp.FSDPModule
    monkeypatch.delitem(sys.modules, "late_framework")
    assert vars(framework)["FSDPModule"] is torch.distributed.fsdp.FSDPModule


IMPORTS_IN_THE_BLOCK = """
import torch
from shardwise.fsdp.frameworks import replace_torch_fsdp
with replace_torch_fsdp():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel
    torch.distributed.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2))
    assert list(get_model_state_dict(model)) == ["weight", "bias"]
"""


def test_distributed_checkpoint_may_be_imported_in_the_block() -> None:
    """llama-cookbook saves adapters with `get_model_state_dict`, which it imports."""
    subprocess.run([sys.executable, "-c", IMPORTS_IN_THE_BLOCK], check=True)


def run(script: str, out: Path, engine: str, *options: str, num_ranks: int = 2) -> Any:
    """Run a program; return the content of OUT/ENGINE.json, which it writes."""
    out.mkdir(exist_ok=True)
    torchrun(num_ranks, script, str(out), "--engine", engine, *options)
    return json.loads((out / f"{engine}.json").read_text())


@thorough
@pytest.mark.parametrize("tp_size", [1, 2])
def test_transformers_distributed_config(tp_size: int, tmp_path: Path) -> None:
    """The losses, and the model that `save_pretrained` wrote."""
    losses, models = {}, {}
    for engine in ("torch", "shardwise"):
        options = "--tp", str(tp_size)
        script = "examples/hf/distributed_config.py"
        losses[engine] = run(script, tmp_path, engine, *options, num_ranks=2 * tp_size)
        models[engine] = load_file(tmp_path / engine / "model.safetensors")
    assert losses["shardwise"] == pytest.approx(losses["torch"], rel=1e-5)
    assert models["shardwise"].keys() == models["torch"].keys()
    for name, expected in models["torch"].items():
        torch.testing.assert_close(models["shardwise"][name], expected, rtol=1e-3, atol=1e-5)


@thorough
@pytest.mark.parametrize(("version", "judge"), [(1, "ddp"), (2, "torch")])
def test_accelerate_fsdp_plugin(version: int, judge: str, tmp_path: Path) -> None:
    """PyTorch's FSDP1 needs a GPU under accelerate, so DDP judges that version."""
    ours, theirs = (
        run("tests/fsdp/accelerate_run.py", tmp_path, engine, "--version", str(version))
        for engine in ("shardwise", judge)
    )
    assert len(ours) == 6
    for one, expected in zip(ours, theirs, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)


@thorough
@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_fsdp_plugin_in_bfloat16(version: int, tmp_path: Path) -> None:
    """FSDP2 judges both versions."""
    ours = run(
        "tests/fsdp/accelerate_run.py", tmp_path, "shardwise", "--version", str(version), "--bf16"
    )
    theirs = run("tests/fsdp/accelerate_run.py", tmp_path, "torch", "--bf16")
    assert len(ours) == 6
    for one, expected in zip(ours, theirs, strict=True):
        assert one == pytest.approx(expected, rel=1e-2)


@thorough
@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
def test_lightning(tmp_path: Path) -> None:
    expected = run("tests/fsdp/lightning_run.py", tmp_path, "torch")  # FSDP2
    assert len(expected) == 6
    for strategy, *more in (("model_parallel",), ("model_parallel", "--full"), ("fsdp",)):
        out = tmp_path / "-".join((strategy, *more))
        ours = run("tests/fsdp/lightning_run.py", out, "shardwise", "--strategy", strategy, *more)
        assert ours == pytest.approx(expected, rel=1e-5)
