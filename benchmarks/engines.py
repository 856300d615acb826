"""The engines that are compared: how each takes a model, and what it can tell of itself."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.train.models import Block

__all__ = ["ENGINES"]


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _shardwise(model: nn.Module, strategy: str, prefetch: int = 1) -> nn.Module:
    return sw.fully_shard(model, units=Block, strategy=strategy, prefetch=prefetch)


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "shardwise-fsdp": partial(_shardwise, strategy="fsdp"),
    "shardwise-fsdp-no-prefetch": partial(_shardwise, strategy="fsdp", prefetch=0),
    "shardwise-fsdp-transaction": partial(_shardwise, strategy="fsdp"),
    "shardwise-zero2": partial(_shardwise, strategy="zero2"),
    "shardwise-ddp": partial(_shardwise, strategy="ddp"),
}
