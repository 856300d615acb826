"""The ranks of one replica: agreement between them, checksums, and copies of their state."""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import parts  # noqa: F401 - the engine uses them
from shardwise.comm.communicator import communicator
from shardwise.errors import PlanError
from shardwise.runtime.engine import Runtime
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = [
    "ANCHOR",
    "SENT",
    "Known",
    "agree",
    "checksum_of",
    "checksum_over_ranks",
    "decode_state",
    "encode_state",
]

# Keys in the state of each parameter, next to the states of the outer optimizer: the shared
# parameter and, with a delay, the difference in transit, which is sent again after a load.
ANCHOR, SENT = "anchor", "sent"


@dataclass(frozen=True)
class Known:
    """What a rank, or every rank of a replica, has received; see `Exchange`."""

    decisions: int  # number of decisions that can be applied
    ticket: int
    is_member: bool
    group_step: int


def agree(own: Known, runtime: Runtime) -> Known:
    """Agree on what every rank has received, so that all ranks do the same next."""
    table = _all_gather(astuple(own), runtime, "agreement on the messages of other replicas")
    decisions, ticket, is_member, group_step = table.amin(0).tolist()
    if ticket != table[:, 1].max():
        ticket = 0
    return Known(decisions, ticket, bool(is_member), group_step)


def checksum_over_ranks(own: int, runtime: Runtime) -> str:
    """Combine the `checksum_of` every rank of this replica."""
    table = _all_gather((own,), runtime, "checksum of frozen parameters")
    return f"{zlib.crc32(table.numpy().tobytes()):08x}"


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """The checksum of this rank's shards of ``tensors``."""
    total = 0
    for tensor in tensors:
        flat = _local(tensor).detach().cpu().contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), total)
    return total


def _all_gather(own: Sequence[int], runtime: Runtime, where: str) -> Tensor:
    """Gather n integers from each rank: [num_ranks, n]."""
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    table = torch.zeros(comm.num_ranks, len(own), dtype=torch.int64)
    table[comm.rank] = torch.tensor(own)
    if comm.num_ranks == 1:
        return table
    table = table.to(runtime.pools.device).flatten()
    comm.place.where = where
    comm.wait(comm.reduce.all_gather(table, comm.world, where))
    return table.view(comm.num_ranks, -1).cpu()


def encode_state(inner: Optimizer, outer: Optimizer) -> bytes:
    """Serialize this rank's shards of the parameters and of the states of both optimizers."""
    state = {
        "parameters": [_local(p).detach().cpu() for p in _parameters(outer)],
        "inner": _states(inner),
        "outer": _states(outer),
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@torch.no_grad()
def decode_state(encoded: bytes, inner: Optimizer, outer: Optimizer) -> None:
    """Load the state that `encode_state` returned on the same rank of another replica.

    Raises:
        PlanError: the replica has another optimizer or other shards.
    """
    state = torch.load(io.BytesIO(encoded), weights_only=True)
    parameters = list(_parameters(outer))  # all trainable ones; ``inner`` may step only some
    _check_kind(inner, state["inner"])
    if [p.shape for p in state["parameters"]] != [_local(p).shape for p in parameters]:
        raise PlanError(
            "the state of another replica has other shards; start all replicas with the same model "
            "and options"
        )
    for parameter, values in zip(parameters, state["parameters"], strict=True):
        _local(parameter).copy_(values)
        torch.autograd.graph.increment_version(parameter)
    _load(inner, state["inner"])
    _load(outer, state["outer"])


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _states(optimizer: Optimizer) -> dict[str, Any]:
    """The states of each parameter and the options of each group.

    A state is ``(shape, is_on_host, value)``: the global shape if it is sharded, else None; whether
    it was on the CPU; and this rank's part of the value.
    """
    return {
        "states": [
            {
                key: (
                    list(value.shape) if isinstance(value, DTensor) else None,
                    not isinstance(value, Tensor) or value.is_cpu,
                    _local(value).detach().cpu() if isinstance(value, Tensor) else value,
                )
                for key, value in optimizer.state.get(parameter, {}).items()
            }
            for parameter in _parameters(optimizer)
        ],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def _check_kind(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raise a PlanError if ``saved`` belongs to another kind of optimizer."""
    groups, own = saved["groups"], optimizer.param_groups
    needed = optimizer.defaults.keys() - {"differentiable"}  # which torch adds after a load
    if len(groups) != len(own) or any(needed - group.keys() for group in groups):
        raise PlanError(
            f"the state of another replica has {len(groups)} groups of parameters with the options "
            f"{', '.join(groups[0])}; expected {len(own)} groups of {type(optimizer).__name__} "
            f"with {', '.join(optimizer.defaults)}; use the same optimizer in all replicas"
        )


def _load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(options)
    # Optimizers whose states are cut differently from their parameters have this method.
    make = getattr(optimizer, "empty_state", None)
    for parameter, state in zip(_parameters(optimizer), saved["states"], strict=True):
        restored = {}
        for key, (shape, is_on_host, value) in state.items():
            if shape is not None:
                restored[key] = _restored(parameter, key, shape, value, make)
            else:  # torch's optimizers may keep "step" on the CPU when parameters are on a GPU
                restored[key] = value if is_on_host else value.to(parameter.device)
        optimizer.state.pop(parameter, None)
        if restored:
            optimizer.state[parameter] = restored


def _restored(
    parameter: Tensor,
    key: str,
    shape: list[int],
    value: Tensor,
    make: Callable[..., Tensor | None] | None,
) -> Tensor:
    """The sharded state whose elements on this rank are ``value``."""
    made = None if make is None else make(parameter, key, shape, value.dtype)
    if made is None:
        sharding = sharding_of(parameter)
        assert sharding is not None
        return sharding.wrap(value.to(parameter.device).reshape(-1))
    local = _local(made)
    if local.numel() != value.numel():
        raise PlanError(
            f"{key}: this rank has {local.numel()} elements, the same rank of the other replica "
            f"{value.numel()}; create the parameter groups in the same order in all replicas"
        )
    local.copy_(value.view(local.shape))
    return made
