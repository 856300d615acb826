"""``StateDictOptions(full_state_dict=True)`` of torch, for sharded tensors of this engine.

`torch.distributed.checkpoint.state_dict` gathers and cuts the kinds of tensors that it knows, and
would hand out ours as they are. Importing the drop-in lets it deal with them, one after the other.
"""

import sys
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _state_dict_utils as utilities
from torch.utils._pytree import tree_map

from shardwise.fsdp.optim_states import cut
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["let_torch_know"]

_USER = "torch.distributed.checkpoint.state_dict"  # takes the functions over when it is imported


def let_torch_know() -> None:
    """Put ours around torch's functions that gather and cut."""
    for name, around in (
        ("_gather_state_dict", _gathering_ours),
        ("_distribute_state_dict", _cutting_ours),
        ("_broadcast_state_dict", _cutting_ours),
    ):
        function = around(getattr(utilities, name))
        setattr(utilities, name, function)
        if _USER in sys.modules:
            setattr(sys.modules[_USER], name, function)


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


def _cutting_ours(fill: Callable[..., None]) -> Callable[..., None]:
    """Around what puts whole tensors into a dict of local ones."""

    @wraps(fill)
    def fill_all(
        whole: dict[str, Any], local: dict[str, Any], *positional: Any, **options: Any
    ) -> None:
        ours = {key: value for key, value in local.items() if isinstance(value, ShardedTensor)}
        fill(whole, local, *positional, **options)
        for key, sharded in ours.items():
            value = local.get(key)
            if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
                local[key] = cut(value, sharded)

    return fill_all
