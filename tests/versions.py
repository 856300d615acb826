"""Marks for tests of what a version of torch does not have (docs/frameworks.md)."""

import pytest
from torch.autograd import Function
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.utils import checkpoint

from shardwise._private import subclasses_of_dtensor_dispatch
from shardwise.runtime.memory import CAN_SWAP

__all__ = [
    "needs_dtype_overrides",
    "needs_dual_checkpoints",
    "needs_meshes_of_parameters",
    "needs_own_operators",
    "needs_swap",
]

needs_swap = pytest.mark.skipif(
    not CAN_SWAP, reason="torch 2.11 cannot swap storages: buffers get memory from the allocator"
)
needs_dual_checkpoints = pytest.mark.skipif(
    getattr(getattr(checkpoint, "_NoopSaveInputs", None), "jvp", None) is Function.jvp,
    reason="torch 2.11 cannot checkpoint in forward-mode differentiation",
)
needs_own_operators = pytest.mark.skipif(
    not subclasses_of_dtensor_dispatch(),
    reason="torch 2.11 runs its own operators for DTensors in a backward",
)
needs_meshes_of_parameters = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"),
    reason="FSDP2 of torch 2.11 has one mesh for all parameters of a unit",
)
needs_dtype_overrides = pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"),
    reason="PyTorch's FSDP2 has param_dtype_override_fn since 2.15 (ours: test_precision.py)",
)
