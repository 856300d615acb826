"""Checkpoints of torch are loaded on other ranks, and torch loads exports, bit for bit."""

import copy
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.checkpoint.offline import export
from tests.covering import covered_first
from tests.ranks import run_on
from tests.runtime.one_process import full, rank

WIDTH = 6


class Net(nn.Module):
    """Has parameters of zero, one, two and four dimensions, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers[1].weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.conv(x.new_ones(1, 3, 2, 2)).sum()
        for layer in self.layers:
            y = layer(y).relu() + y
        z: Tensor = self.norm(y)
        return z


WRITERS = ("fsdp2", "fsdp1", "flattened", "model alone")


@pytest.mark.parametrize(("writer", "ranks"), covered_first(product(WRITERS, (3, 1))))
def test_a_distributed_checkpoint_is_read_on_other_ranks(
    writer: str, ranks: int, tmp_path: Path
) -> None:
    run_on(2, _write, writer, tmp_path)
    run_on(ranks, _read, tmp_path, "dcp", writer != "model alone")


def test_an_optimizer_may_have_any_name(tmp_path: Path) -> None:
    run_on(2, _write, "fsdp2", tmp_path, "adamw")
    run_on(3, _read, tmp_path, "dcp", True, "adamw")
    content = torch.load(tmp_path / "expected.pt")
    shutil.rmtree(tmp_path / "checkpoint")
    content["adamw"] = content.pop("optimizer")
    torch.save(content, tmp_path / "checkpoint")
    run_on(3, _read, tmp_path, "torch", True, "adamw")


def test_each_rank_reads_only_its_own_bytes(tmp_path: Path) -> None:
    run_on(2, _write, "model alone", tmp_path)
    counts, whole = zip(*run_on(3, _read, tmp_path, "dcp", False), strict=True)
    # Every rank reads the buffers and its own shards.
    buffers = (2 * WIDTH) * 4 + 8
    assert sum(counts) == whole[0] + 3 * buffers
    assert max(counts) < 0.5 * whole[0]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_state_dict_is_read_on_other_ranks(with_optimizer: bool, tmp_path: Path) -> None:
    run_on(2, _write, "fsdp2", tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    shutil.rmtree(tmp_path / "checkpoint")
    torch.save(expected if with_optimizer else expected["model"], tmp_path / "checkpoint")
    run_on(3, _read, tmp_path, "torch", with_optimizer)


def test_an_export_is_read_by_fsdp2(tmp_path: Path) -> None:
    run_on(3, _write_own, tmp_path)
    export(tmp_path / "own", tmp_path / "checkpoint", "dcp")
    run_on(2, _read_with_torch, tmp_path)


def test_unreadable_files_and_mismatches_are_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = optimizer.state_dict() | {"state": {0: {"step": torch.ones(1)}}}
    state = {"model": model.state_dict(), "optim": numbers}
    torch.save(state, tmp_path / "torch")
    save_distributed(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in ("torch", "dcp"):
        given: Any = {"model": model, "source": source}
        sw.load(tmp_path / source, **given)  # without the optimizer
        with pytest.raises(sw.CheckpointError, match=r"optimizer: .* numbers as keys.*get_state_d"):
            sw.load(tmp_path / source, optimizer=optimizer, strict=False, **given)
    torch.save([1], tmp_path / "list")
    with pytest.raises(sw.CheckpointError, match="expected a dict, got a list"):
        sw.load(tmp_path / "list", model=model, source="torch")
    (tmp_path / "noise").write_bytes(b"noise")
    with pytest.raises(sw.CheckpointError, match="not a state dict of torch"):
        sw.load(tmp_path / "noise", model=model, source="torch")
    with pytest.raises(sw.CheckpointError, match="metadata is missing"):
        sw.load(tmp_path, model=model, source="dcp")
    with pytest.raises(sw.CheckpointError, match="expected 'shardwise', 'hf', 'dcp' or 'torch'"):
        sw.load(tmp_path, model=model, source="onnx")  # type: ignore[arg-type]
    other = {**model.state_dict(), "more": torch.ones(1)}
    del other["conv.bias"]
    save_distributed(other, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(sw.CheckpointError, match=r"(?s)missing.*conv\.bias.*unexpected.*more"):
        sw.load(tmp_path / "x", model=model, source="dcp")


def test_values_next_to_a_model_are_returned(tmp_path: Path) -> None:
    saved, model = Net(), Net()
    state = {"model": saved.state_dict(), "step": 5, "seen": torch.tensor(7)}
    save_distributed(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert sw.load(tmp_path / "x", model=model, source="dcp").state == {"step": 5, "seen": 7}
    assert torch.equal(model.conv.weight, saved.conv.weight)
    before = Net().state_dict()
    model.load_state_dict(before)
    save_distributed({**saved.state_dict(), "step": 5}, checkpoint_id=tmp_path / "y", no_dist=True)
    with pytest.raises(sw.CheckpointError, match="model: saved as object, which a Net cannot load"):
        sw.load(tmp_path / "y", model=model, source="dcp")
    assert torch.equal(model.conv.weight, before["conv.weight"])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    model = Net()
    save_distributed(model.state_dict(), checkpoint_id=tmp_path / "x", no_dist=True)
    (file,) = (tmp_path / "x").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(sw.CheckpointDamaged, match="cannot be read"):
        sw.load(tmp_path / "x", model=model, source="dcp")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # By name, because in FSDP1 all parameters have one dimension.
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if "weight" in name]
    others = [p for name, p in named if "weight" not in name]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.25}]
    return torch.optim.AdamW(groups, lr=0.125)


def _write(writer: str, path: Path, name: str = "optim") -> None:
    model: nn.Module = Net()
    plain = copy.deepcopy(model)
    if writer == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    optimizer = _optimizer(model)
    _train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    whole = StateDictOptions(full_state_dict=True)
    whole_weights, whole_states = get_state_dict(model, optimizer, options=whole)
    if rank() == 0:
        assert set(whole_weights) == set(plain.state_dict())
        torch.save({"model": whole_weights, "optimizer": whole_states}, path / "expected.pt")
    state: dict[str, Any] = {"model": weights, name: states}
    if writer == "flattened":
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {
            "model": weights,
            "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        }
    save_distributed(
        weights if writer == "model alone" else state, checkpoint_id=path / "checkpoint"
    )


def _read(path: Path, source: Any, with_optimizer: bool, key: str = "optimizer") -> tuple[int, int]:
    torch.manual_seed(1)
    model = Net()
    sw.fully_shard(model, units=nn.Linear)
    optimizer = _optimizer(model)
    given: dict[str, Any] = {key: optimizer} if with_optimizer else {}
    loaded = sw.load(path / "checkpoint", model=model, source=source, **given)
    expected = torch.load(path / "expected.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(full(tensor), expected["model"][name]), name
    if with_optimizer:
        _compare(model, optimizer, expected["optimizer"])
    return loaded.bytes_read, sum(p.nbytes for p in model.parameters())


def _compare(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Any) -> None:
    for name, parameter in model.named_parameters():
        states = optimizer.state.get(parameter, {})
        wanted = expected["state"].get(name, {})
        assert set(states) == set(wanted), name
        for key, value in states.items():
            assert isinstance(value, DTensor) == (isinstance(parameter, DTensor) and key != "step")
            whole = value.full_tensor() if isinstance(value, DTensor) else full(value)
            assert torch.equal(whole, wanted[key]), f"{name} {key}"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]


def _write_own(path: Path) -> None:
    model = Net()
    sw.fully_shard(model, units=nn.Linear)
    optimizer = _optimizer(model)
    _train(model, optimizer)
    sw.save(path / "own", model=model, optimizer=optimizer)
    weights = {name: full(tensor) for name, tensor in model.state_dict().items()}
    states = {
        name: {key: full(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if rank() == 0:
        torch.save({"model": weights, "optimizer": {"state": states}}, path / "expected.pt")


def _read_with_torch(path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = _optimizer(model)
    _train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states}
    load_distributed(state, checkpoint_id=path / "checkpoint")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    expected = torch.load(path / "expected.pt")
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected["model"][name]), name
    _compare(model, optimizer, expected["optimizer"])
    dist.barrier()
