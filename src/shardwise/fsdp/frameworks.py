"""Support for frameworks that import PyTorch's FSDP themselves: accelerate, Lightning, ..."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import sharded_grad_scaler

from shardwise._private import COMPOSABLE_FSDP, PRIVATE_FSDP2, fsdp2_state_function
from shardwise.features.fsdp_module import (
    FSDPModule,
    FSDPState,
    GradientReductionHandle,
    UnshardHandle,
)
from shardwise.fsdp.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from shardwise.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["replace_torch_fsdp"]

_OURS: tuple[Any, ...] = (
    FSDPModule,
    FullyShardedDataParallel,
    GradientReductionHandle,  # in PyTorch since 2.15
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)


_TORCHS_STATE = fsdp2_state_function()


def _get_module_fsdp_state(module: nn.Module) -> Any:
    """The state of a unit, also on the meta device; for other modules, PyTorch's answer."""
    if isinstance(module, FSDPModule):
        return FSDPState(module)
    return _TORCHS_STATE(module)


# PyTorch's objects and ours. Option classes and wrap policies are the same in both.
_PAIRS: tuple[tuple[Any, Any], ...] = (
    *((getattr(fsdp, o.__name__), o) for o in _OURS if hasattr(fsdp, o.__name__)),
    (sharded_grad_scaler.ShardedGradScaler, ShardedGradScaler),
    (_TORCHS_STATE, _get_module_fsdp_state),
)

_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    COMPOSABLE_FSDP,
    *PRIVATE_FSDP2,
    "torch.distributed.pipelining.stage",
)

# It imports FSDP1, and has to find no unit of it in a model of ours.
_UNCHANGED = "torch.distributed.checkpoint.state_dict"


@contextmanager
def replace_torch_fsdp(*modules: str) -> Iterator[None]:
    """Replace PyTorch's FSDP1 and FSDP2 by this package's for code in the block::

        with replace_torch_fsdp():
            model, optimizer = accelerator.prepare(model, optimizer)
            ...

    This changes attributes of PyTorch's modules, for all threads of this process, and restores them
    at the end of the block. Keep the block open while the framework trains, saves and loads.

    Args:
        modules: names of the framework's modules that import FSDP at their top level, such as
            ``"transformers.distributed.fsdp"``: they have imported PyTorch's.
    """
    # A module that is imported after a replacement would keep it when the block ends.
    importlib.import_module(_UNCHANGED)
    imported = [importlib.import_module(name) for name in (*_MODULES, *modules)]
    replaced = []
    for module in imported:
        for name, value in list(vars(module).items()):
            for theirs, ours in _PAIRS:
                if value is theirs:
                    replaced.append((module, name, value))
                    setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
