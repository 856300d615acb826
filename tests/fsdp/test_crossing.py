"""shardwise loads what PyTorch's FSDP1 and FSDP2 saved, and the reverse, bit for bit."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tests.fsdp.both import DEADLINE
from tests.fsdp.models import make_net
from tests.fsdp.programs2 import OPTIMIZERS, loss_of, shard
from tests.ranks import on_ranks
from tests.runtime.one_process import rank

TORCH, OURS = "torch.distributed.fsdp", "shardwise.fsdp"
KINDS = ("fsdp2", "from rank 0", "dcp")
WHOLE = StateDictOptions(full_state_dict=True)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize(("writer", "reader"), [(TORCH, OURS), (OURS, TORCH)])
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        # PyTorch 2.13 gathers full states of FSDP1 wrongly on the CPU if a parameter has several.
        ("fsdp1", "sgd"),
        *((kind, "adamw") for kind in KINDS),
        *(pytest.param(kind, "sgd", marks=pytest.mark.thorough) for kind in KINDS),
    ],
)
def test_state_dicts_of_the_other_implementation_are_loaded(
    kind: str, optimizer: str, writer: str, reader: str, tmp_path: Path
) -> None:
    _save(kind, optimizer, writer, tmp_path)
    dist.barrier()
    _load(kind, optimizer, reader, tmp_path)


def _trained(kind: str, optimizer: str, f: Any, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    net: nn.Module = make_net(seed=seed)
    if kind == "fsdp1":
        device = torch.device("cpu")
        net = f.FullyShardedDataParallel(net, use_orig_params=True, device_id=device)
    else:
        net = shard(f, net)
    chosen = OPTIMIZERS[optimizer](net.parameters())
    for step in range(2):
        loss_of(net, step + seed).backward()
        chosen.step()
        chosen.zero_grad()
    return net, chosen


def _whole(kind: str, f: Any, net: Any, optimizer: torch.optim.Optimizer) -> Any:
    if kind != "fsdp1":
        return get_state_dict(net, optimizer, options=WHOLE)
    return net.state_dict(), f.FullyShardedDataParallel.optim_state_dict(net, optimizer)


def _save(kind: str, name: str, writer: str, path: Path) -> None:
    f = importlib.import_module(writer)
    net, optimizer = _trained(kind, name, f, seed=0)
    whole = _whole(kind, f, net, optimizer)
    if rank() == 0:
        torch.save(whole, path / "whole.pt")
    if kind == "dcp":
        weights, states = get_state_dict(net, optimizer)
        save_distributed({"model": weights, "optim": states}, checkpoint_id=path / "dcp")


def _load(kind: str, name: str, reader: str, path: Path) -> None:
    f = importlib.import_module(reader)
    net, optimizer = _trained(kind, name, f, seed=3)
    weights, states = torch.load(path / "whole.pt")
    if kind == "fsdp1":
        net.load_state_dict(weights)
        to_load = f.FullyShardedDataParallel.optim_state_dict_to_load(net, optimizer, states)
        optimizer.load_state_dict(to_load)
    elif kind != "dcp":
        sends = kind == "from rank 0"
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
        if sends and rank() > 0:
            weights, states = {}, {}
        set_model_state_dict(net, weights, options=options)
        set_optimizer_state_dict(net, optimizer, states, options=options)
    else:
        own, own_states = get_state_dict(net, optimizer)
        read: dict[str, Any] = {"model": own, "optim": own_states}
        load_distributed(read, checkpoint_id=path / "dcp")
        set_state_dict(
            net, optimizer, model_state_dict=read["model"], optim_state_dict=read["optim"]
        )
    expected = torch.load(path / "whole.pt")  # read again: loading changed the tensors
    _assert_equal(_whole(kind, f, net, optimizer), expected, "state")
    loss_of(net, 0).backward()  # training continues
    optimizer.step()


def _assert_equal(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert set(found) == set(expected), what
        for key, value in expected.items():
            _assert_equal(found[key], value, f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_equal(one, other, f"{what}[{number}]")
    else:
        assert found == expected, f"{what}: {found}, expected {expected}"
