"""Exported checkpoints are read by other programs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

import shardwise as sw
from shardwise.cli import main
from tests.checkpoint.training import Training
from tests.models import Gpt
from tests.ranks import run_on
from tests.runtime.one_process import full, rank


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run_on(2, _save, tmp_path / "x")
    return tmp_path / "x"


def test_export_to_hugging_face(saved: Path, tmp_path: Path) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--format", "hf"]) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert file.read_bytes() == (saved / "model.safetensors").read_bytes()
    expected = torch.load(tmp_path / "expected.pt")["model"]
    read = load_file(file)
    assert set(read) == set(expected) - {"head.weight"}
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_export_to_torch(saved: Path, tmp_path: Path) -> None:
    assert main(["export", str(saved), str(tmp_path / "out.pt"), "--format", "torch"]) == 0
    state, expected = (torch.load(tmp_path / name) for name in ("out.pt", "expected.pt"))
    model = Gpt().double()
    model.load_state_dict(state["model"])
    assert all(torch.equal(x, expected["model"][name]) for name, x in model.state_dict().items())
    for name, states in expected["state"].items():
        for key, value in states.items():
            assert torch.equal(state["optimizer"]["state"][name][key], value), f"{name} {key}"
    assert state["cursor"] == (3, "x")


def test_export_to_distributed_checkpoint(saved: Path, tmp_path: Path) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--format", "dcp"]) == 0
    expected = torch.load(tmp_path / "expected.pt")["model"]
    state = {"model": {name: torch.zeros_like(x) for name, x in expected.items()}}
    load_distributed(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state["model"][name], x) for name, x in expected.items())


def test_errors_leave_no_output(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "expected one of hf, dcp, torch" in capsys.readouterr().err
    assert main(["export", str(saved), str(saved)]) == 2
    assert "already exists" in capsys.readouterr().err
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    assert main(["export", str(saved), str(tmp_path / "out")]) == 1
    assert not list(tmp_path.glob("out*")), "something was left"
    assert "differ from what was saved" in " ".join(capsys.readouterr().err.split())


def _save(path: Path) -> None:
    training = Training("gpt")
    training.step()
    model, optimizer = training.model, training.optimizer
    sw.save(path, model=model, optimizer=optimizer, cursor=(3, "x"))
    state = {
        name: {key: full(value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }
    whole = {name: full(x).detach() for name, x in model.state_dict(keep_vars=True).items()}
    if rank() == 0:
        torch.save({"model": whole, "state": state}, path.parent / "expected.pt")
