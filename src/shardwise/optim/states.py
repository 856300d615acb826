"""This rank's states of an optimizer as plain data, and states to load values into."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.runtime.attach import parameters_of, unowned_states
from shardwise.tensor.sharded_tensor import RunSharding
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = ["check_options", "empty_state", "load_local_states", "local_states"]


def local_states(optimizer: Optimizer) -> dict[str, Any]:
    """The states of each parameter, those that belong to none, and the options of each group.

    A state is ``(shape, is_on_host, value)``: the global shape if it is sharded, else None; whether
    it is on the CPU; and this rank's part of the value. Tensors share memory with the optimizer.
    """

    def described(value: Any) -> tuple[list[int] | None, bool, Any]:
        if not isinstance(value, Tensor):
            return None, True, value
        shape = list(value.shape) if isinstance(value, DTensor) else None
        return shape, value.is_cpu, local_of(value).detach()

    return {
        "states": [
            {key: described(value) for key, value in optimizer.state.get(one, {}).items()}
            for one in parameters_of(optimizer)
        ],
        "unowned": {key: described(value) for key, value in unowned_states(optimizer).items()},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def check_options(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise a PlanError if ``groups`` of another replica are of another kind of optimizer."""
    own = optimizer.param_groups
    needed = optimizer.defaults.keys() - {"differentiable"}  # which torch adds after a load
    if len(groups) != len(own) or any(needed - group.keys() for group in groups):
        raise PlanError(
            f"the state of another replica has {len(groups)} groups of parameters with the options "
            f"{', '.join(groups[0])}; expected {len(own)} groups of {type(optimizer).__name__} "
            f"with {', '.join(optimizer.defaults)}; use the same optimizer in all replicas"
        )


def load_local_states(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load what `local_states` returned on the same rank of another replica.

    Raises:
        PlanError: a state is cut differently there.
    """
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(options)
    parameters = parameters_of(optimizer)
    for parameter, state in zip(parameters, saved["states"], strict=True):
        optimizer.state.pop(parameter, None)
        for key, (shape, is_on_host, value) in state.items():
            own = _on_device(value, parameter, is_on_host=is_on_host)
            if shape is not None:
                own = _sharded(optimizer, parameter, key, shape, own)
            optimizer.state[parameter][key] = own
    states: dict[Any, Any] = optimizer.state
    for key in unowned_states(optimizer):
        del states[key]
    for key, (_, is_on_host, value) in saved["unowned"].items():
        states[key] = _on_device(value, parameters[0], is_on_host=is_on_host)


def empty_state(
    optimizer: Optimizer, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """A tensor for the state ``key`` if the optimizer cuts it differently from its parameter."""
    # Such optimizers have a method of this name; see `Adam8bit.empty_state`.
    make = getattr(optimizer, "empty_state", None)
    made: Tensor | None = None if make is None else make(parameter, key, shape, dtype)
    return made


def _on_device(value: Any, parameter: Tensor, *, is_on_host: bool) -> Any:
    """A copy of a state, which may be on the CPU with parameters on a GPU, as ``step`` is."""
    if not isinstance(value, Tensor):
        return value
    return (value if is_on_host else value.to(parameter.device)).clone()


def _sharded(
    optimizer: Optimizer, parameter: Tensor, key: str, shape: list[int], value: Tensor
) -> Tensor:
    """The sharded state whose elements on this rank are ``value``."""
    made = empty_state(optimizer, parameter, key, shape, value.dtype)
    if made is None:
        sharding = sharding_of(parameter)
        assert sharding is not None
        if isinstance(sharding, RunSharding):  # states may have another shape, as in Prodigy
            sharding = sharding.with_shape(tuple(shape))
        return sharding.wrap(value.reshape(-1))
    local = local_of(made)
    if local.numel() != value.numel():
        raise PlanError(
            f"{key}: this rank has {local.numel()} elements, the same rank of the other replica "
            f"{value.numel()}; create the parameter groups in the same order in all replicas"
        )
    local.copy_(value.view(local.shape))
    return made
