"""Parameters that another library has already sharded."""

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import shardwise as sw
from tests.ranks import on_ranks


@on_ranks(2)
def test_dtensor_parameters_are_refused_by_name() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second)
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(second.weight.detach(), mesh, [Replicate()]))
    second.weight = weight
    with pytest.raises(sw.PlanError, match=r"1\.weight is a DTensor with"):
        sw.fully_shard(model)
    sw.fully_shard(model, ignored_params=[weight])
    assert not isinstance(second.weight, sw.ShardedTensor)
    assert isinstance(first.weight, sw.ShardedTensor)
