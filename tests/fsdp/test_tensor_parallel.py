"""FSDP1 around tensor parallelism: state dicts on the mesh of both."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.fsdp import FullyShardedDataParallel, StateDictType
from tests.ranks import on_ranks

FSDP = FullyShardedDataParallel
KIND = StateDictType.SHARDED_STATE_DICT


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 15), nn.Linear(15, 3)).double()


def whole(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full


@on_ranks(4)
def test_sharded_state_dicts_are_on_the_mesh_of_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = net(), net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    wrapped = FSDP(model, device_mesh=mesh["dp"])
    FSDP.set_state_dict_type(wrapped, KIND)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, wrapped)]
    x = torch.ones(2, 5, dtype=torch.float64)
    for one, optimizer in zip((plain, wrapped), optimizers, strict=True):
        one(x).pow(2).sum().backward()
        optimizer.step()
    saved, states = wrapped.state_dict(), FSDP.optim_state_dict(wrapped, optimizers[1])["state"]
    for index, (name, expected) in enumerate(plain.state_dict().items()):
        found = saved[name]
        assert (found.device_mesh, found.placements[0]) == (mesh, Shard(0))
        torch.testing.assert_close(whole(found), expected)
        moments = optimizers[0].state_dict()["state"][index]
        torch.testing.assert_close(whole(states[name]["exp_avg"]), moments["exp_avg"])
    assert saved["2.weight"].placements == (Shard(0), Replicate())
    before = {name: value.clone() for name, value in saved.items()}
    wrapped(x).sum().backward()
    optimizers[1].step()
    wrapped.load_state_dict(before)
    loaded = {"state": states, "param_groups": FSDP.optim_state_dict(wrapped, optimizers[1])}
    loaded["param_groups"] = loaded["param_groups"]["param_groups"]
    optimizers[1].load_state_dict(FSDP.optim_state_dict_to_load(wrapped, optimizers[1], loaded))
    again = FSDP.optim_state_dict(wrapped, optimizers[1])["state"]
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value.to_local(), before[name].to_local())
        assert torch.equal(again[name]["exp_avg"].to_local(), states[name]["exp_avg"].to_local())
    dist.barrier()


@on_ranks(4)
def test_fsdp_shards_over_the_first_dim_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = FSDP(net(), device_mesh=mesh)
    assert [p.device_mesh.size() for p in model.parameters()] == [2] * 6  # type: ignore[attr-defined]
