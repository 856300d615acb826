"""Groups of ranks, and where their shards are."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm.api import RankGroup, Sent, Work
from shardwise.plan.axes import AxisBytes
from shardwise.plan.strategy import STRATEGIES
from shardwise.tensor import mesh as meshes
from shardwise.tensor.mesh import DataParallelMesh, resolve_mesh
from tests.ranks import on_ranks


def test_bytes_are_counted_by_axis() -> None:
    world = RankGroup(tuple(range(8)), 5)
    row, column = world.select(4, 5, 6, 7), world.select(1, 5)
    mesh = DataParallelMesh(world, row, column, row, (row.ranks,))
    works = [mock.Mock(Work, sent=[Sent(group.ranks, 10)]) for group in (row, column)]
    expected = AxisBytes(shard=30, replicate=10)
    inner = AxisBytes(shard=30, replicate=10, subgroup=10)  # to the other rank of [4, 5]
    assert mesh.axis_bytes(works) == expected
    assert mesh.axis_bytes(works, 2) == inner


@on_ranks(2)
def test_no_step_counts_bytes() -> None:
    """A group may have thousands of ranks, and a unit has several collectives in a step."""
    model = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)), units=nn.Linear, unused="zeros")
    with mock.patch.object(DataParallelMesh, "axis_bytes", side_effect=AssertionError):
        model(torch.ones(1, 4)).sum().backward()
    assert sw.ledger(model).sent_bytes().total > 0


@on_ranks(1, 2)
def test_one_rank_uses_the_accelerator_of_the_job_as_several_do() -> None:
    gpu = torch.device("cuda", 3)
    with (
        mock.patch.object(meshes, "accelerator_type", {dist.group.WORLD: "cuda"}.get),
        mock.patch.object(meshes, "rank_device", return_value=gpu),
    ):
        assert resolve_mesh(None, STRATEGIES["fsdp"]).accelerator == gpu
