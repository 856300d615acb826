"""``StateDictOptions(full_state_dict=True)`` of torch, for sharded parameters of this engine.

`torch.distributed.checkpoint.state_dict` gathers the kinds of tensors that it knows, and would hand
out ours as they are. Importing the drop-in has them gathered first, one after the other.
"""

import sys
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils as utilities
from torch.utils._pytree import tree_map

from shardwise.runtime.sharded_tensor import ShardedTensor

__all__ = ["let_torch_gather"]


_NAME = "_gather_state_dict"
_USER = "torch.distributed.checkpoint.state_dict"  # takes it over when it is imported


def let_torch_gather() -> None:
    """Have torch's functions find whole tensors where they look for something to gather."""
    gather = _gathering_ours(getattr(utilities, _NAME))
    setattr(utilities, _NAME, gather)
    if _USER in sys.modules:
        setattr(sys.modules[_USER], _NAME, gather)


def _gathering_ours(gather: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(gather)
    def gather_all(
        state_dict: dict[str, Any],
        *,
        cpu_offload: bool = False,
        ranks_only: Collection[int] = (),
        **options: Any,
    ) -> dict[str, Any]:
        is_taken = not ranks_only or dist.get_rank() in ranks_only

        def whole(value: Any) -> Any:
            if not isinstance(value, ShardedTensor):
                return value
            full = value.full_tensor()  # on all ranks, of which some throw it away
            if not is_taken:
                return torch.empty(0)
            return full.cpu() if cpu_offload else full

        return gather(
            tree_map(whole, state_dict), cpu_offload=cpu_offload, ranks_only=ranks_only, **options
        )

    return gather_all
