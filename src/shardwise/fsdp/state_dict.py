"""``torch.distributed.checkpoint.state_dict`` with support for full state dicts.

PyTorch's functions save and load `ShardedTensor`s, but cannot gather or shard them. For
``StateDictOptions(full_state_dict=True)`` import the functions from here. All other options are
passed to PyTorch's functions.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._private import pytree
from shardwise.fsdp.distribute import distribute, group_of

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = Optimizer | Iterable[Optimizer]
States = dict[str, Any]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> States:
    """PyTorch's function. With ``full_state_dict=True``, all ranks must call it."""
    states = torch_state_dict.get_model_state_dict(
        model, submodules=submodules, options=_sharded(options)
    )
    return _gather(states, options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> States:
    """PyTorch's function. With ``full_state_dict=True``, all ranks must call it."""
    states = torch_state_dict.get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=_sharded(options)
    )
    return _gather(states, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[States, States]:
    """`get_model_state_dict` and `get_optimizer_state_dict`."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: States, *, options: StateDictOptions | None = None
) -> Any:
    """PyTorch's function. With ``broadcast_from_rank0=True``, rank 0 sends one tensor at a time."""
    if options is not None and options.full_state_dict:
        like = torch_state_dict.get_model_state_dict(model)
        model_state_dict = distribute(model_state_dict, like, _source(model, options))
    return torch_state_dict.set_model_state_dict(model, model_state_dict, options=_sharded(options))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: States,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """PyTorch's function. With ``broadcast_from_rank0=True``, rank 0 sends one tensor at a time."""
    sharded = _sharded(options)
    if options is not None and options.full_state_dict:
        like = torch_state_dict.get_optimizer_state_dict(model, optimizers, options=sharded)
        optim_state_dict = distribute(optim_state_dict, like, _source(model, options))
    torch_state_dict.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=sharded)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: States,
    optim_state_dict: States,
    options: StateDictOptions | None = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict`."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


def _sharded(options: StateDictOptions | None) -> StateDictOptions | None:
    """``options`` for PyTorch's functions, which get and set sharded tensors only."""
    if options is None or not options.full_state_dict:
        return options
    return replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)


def _gather(states: States, options: StateDictOptions | None) -> States:
    """Gather full tensors one by one. With ``cpu_offload``, only rank 0 keeps them."""
    if options is None or not options.full_state_dict:
        return states
    is_kept = not options.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0

    def gather(value: Any) -> Any:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if not is_kept:
            return None
        return full.cpu() if options.cpu_offload and isinstance(full, Tensor) else full

    gathered: States = pytree.tree_map(gather, states)
    return gathered if is_kept else {}


def _source(model: nn.Module, options: StateDictOptions) -> dist.ProcessGroup | None:
    """The group whose rank 0 has the state dict; None if every rank has it."""
    return group_of(model) if options.broadcast_from_rank0 else None
