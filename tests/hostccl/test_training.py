"""torch's DDP and FSDP2, and shardwise, train on the backend "hostccl" as they do on Gloo."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardwise._private import group_timeout
from shardwise.features.host_collectives import HostCollectives
from shardwise.hostccl import HostGroup
from tests import ranks
from tests.models import Block
from tests.ranks import RankFailed, on_ranks, run_on
from tests.runtime.one_process import assert_equal_training, comm_of, rank, world_size

THOROUGH = pytest.mark.thorough
STEPS = 5
NAMES = itertools.count()  # of the default groups that this rank makes


@contextmanager
def default_group(backend: str) -> Iterator[None]:
    """Within it, the job's process group has another backend."""
    _renew_default_group(backend)
    try:
        yield
    finally:
        _renew_default_group("gloo")


def _renew_default_group(backend: str) -> None:
    assert dist.group.WORLD is not None
    store, own, size = dist.group.WORLD.get_group_store(), rank(), world_size()
    dist.destroy_process_group()
    store = PrefixStore(f"default {next(NAMES)}", store)
    dist.init_process_group(backend, store=store, rank=own, world_size=size)


class Layers(nn.Sequential):
    """Some parameters are sent inline, and some are read from memory."""

    def __init__(self) -> None:
        super().__init__(*(Block(96) for _ in range(3)))


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1)


def _ddp_with_a_hook(model: nn.Module) -> nn.Module:
    model = DistributedDataParallel(model, find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def _fsdp1(model: nn.Module) -> nn.Module:
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)


def _fsdp2(model: nn.Module) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(model).set_allocate_memory_from_process_group_for_comm(True)
    return model


def _hsdp(model: nn.Module) -> nn.Module:
    mesh = _two_dimensions()
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size(),))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


WRAPPERS = [_ddp, _ddp_with_a_hook, _fsdp1, _fsdp2, _hsdp, _tensor_parallel]


@pytest.mark.parametrize(
    ("wrap", "world_size"),
    [
        pytest.param(wrap, size, marks=() if (size == 4) == (wrap is _hsdp) else THOROUGH)
        for wrap in WRAPPERS
        for size in (2, 4)
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else None,
)
@on_ranks()
def test_losses_are_those_of_gloo(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert dist.get_backend() == "gloo"
    expected = _train(wrap)
    with default_group("cpu:hostccl"):
        assert isinstance(dist.group.WORLD, HostGroup)
        found = _train(wrap)
    assert expected[0] > 2 * expected[-1], "it learns"
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def _train(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    """Return the losses of this rank."""
    torch.default_generator.manual_seed(0)
    model = wrap(Layers().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    batch = torch.randn(4, 96, dtype=torch.float64) * (1 + rank() / 8)
    for _ in range(STEPS):
        loss = (model(batch) - batch.roll(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("wrap", [_ddp, _fsdp2], ids=lambda wrap: wrap.__name__[1:])
def test_a_dead_rank_raises_in_backward(
    wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 60.0)
    with pytest.raises(RankFailed) as failure:
        run_on(3, _outlive, wrap, deadline=60.0)
    assert failure.value.headlines == {2: "was killed by SIGKILL"}


def _outlive(wrap: Callable[[nn.Module], nn.Module]) -> None:
    _renew_default_group("cpu:hostccl")
    model = wrap(Layers())
    loss = model(torch.ones(4, 96)).mean()
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"rank {rank()} lost rank 2"):
        loss.backward()


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        pytest.param(strategy, size, marks=() if (size == 4) == (strategy == "hsdp") else THOROUGH)
        for strategy in ("fsdp", "hsdp", "ddp")
        for size in (2, 4)
    ],
)
@on_ranks()
def test_shardwise_trains_as_in_one_process(strategy: str) -> None:
    with default_group("cpu:hostccl"):
        mesh = _two_dimensions() if strategy == "hsdp" else None
        model = assert_equal_training("stack", strategy=strategy, mesh=mesh)
        gather = comm_of(model).gather
        assert isinstance(gather, HostCollectives)
        assert dist.group.WORLD is not None
        assert gather.point_to_point.timeout == group_timeout(dist.group.WORLD)


def _two_dimensions() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
