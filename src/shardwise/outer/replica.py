"""The ranks of one replica: what all of them know, and a copy of what each of them has."""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.tensor.sharding import local_of, sharding_of
from shardwise.transport.communicator import Communicator

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

# States beside those of the outer optimizer: the shared parameters and, with a delay, a difference
# that is on its way, which is sent again after a load.
ANCHOR, SENT = "anchor", "sent"


@dataclass(frozen=True)
class Known:
    """What a rank has received."""

    decisions: int  # that can be applied
    ticket: int  # of the state that has come; 0: none
    is_member: bool
    group_step: int = 0  # see `Exchange`


def agree(own: Known, links: Communicator, device: torch.device) -> Known:
    """What all ranks have received, so that all of them do the same next."""
    if links.num_ranks == 1:
        return own
    table = _of_all_ranks(astuple(own), links, device, "agreement on what other replicas have sent")
    least, most = table.amin(0).tolist(), table.amax(0).tolist()
    ticket = least[1] if least[1] == most[1] else 0
    return Known(least[0], ticket, bool(least[2]), least[3])


def checksum_over_ranks(own: int, links: Communicator, device: torch.device) -> str:
    """A checksum of the `checksum_of` all ranks of this replica."""
    table = _of_all_ranks((own,), links, device, "checksum of frozen parameters")
    return f"{zlib.crc32(table.numpy().tobytes()):08x}"


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """Of what this rank has of them."""
    total = 0
    for tensor in tensors:
        flat = _local(tensor).detach().cpu().contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), total)
    return total


def _of_all_ranks(
    own: Sequence[int], links: Communicator, device: torch.device, where: str
) -> Tensor:
    """The numbers of each rank, as a table [rank, number]."""
    table = torch.zeros(links.num_ranks, len(own), dtype=torch.int64)
    table[links.rank] = torch.tensor(own)
    if links.num_ranks == 1:
        return table
    table = table.to(device).flatten()
    links.where = where
    links.wait(links.reduce.all_gather(table, links.world, where))
    return table.view(links.num_ranks, -1).cpu()


def encode_state(inner: Optimizer, outer: Optimizer) -> bytes:
    """What this rank has of parameters and both optimizers."""
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
    """The reverse, of the rank at the same place in another replica."""
    state = torch.load(io.BytesIO(encoded), weights_only=True)
    parameters = list(_parameters(outer))  # all that are trained; others may step some of them
    _check_kind(inner, state["inner"])
    if [p.shape for p in state["parameters"]] != [_local(p).shape for p in parameters]:
        raise PlanError("the state of another replica has other shards; start all of them alike")
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
    """Each state with the shape of the whole, if it is sharded, and whether it was on the host."""
    return {
        "states": [
            {
                key: (
                    list(value.shape) if isinstance(value, DTensor) else None,
                    not isinstance(value, Tensor) or value.is_cpu,
                    _on_host(value),
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


def _on_host(value: Any) -> Any:
    return _local(value).detach().cpu() if isinstance(value, Tensor) else value


def _check_kind(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    groups, own = saved["groups"], optimizer.param_groups
    needed = optimizer.defaults.keys() - {"differentiable"}  # which torch adds after a load
    if len(groups) != len(own) or any(needed - group.keys() for group in groups):
        raise PlanError(
            f"the state of another replica has {len(groups)} groups of parameters with the options "
            f"{', '.join(groups[0])}; expected {len(own)} groups of {type(optimizer).__name__} "
            f"with {', '.join(optimizer.defaults)}; make the same optimizer in all replicas"
        )


def _load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(options)
    # As in a checkpoint: memory for states that are not cut as their parameters are.
    make = getattr(optimizer, "empty_state", None)
    for parameter, state in zip(_parameters(optimizer), saved["states"], strict=True):
        restored = {
            # "step" of torch's optimizers may be on the host beside parameters on an accelerator.
            key: (value if on_host else value.to(parameter.device))
            if shape is None
            else _restored(parameter, key, shape, value, make)
            for key, (shape, on_host, value) in state.items()
        }
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
    """A sharded state with the elements ``value`` on this rank."""
    made = None if make is None else make(parameter, key, shape, value.dtype)
    if made is None:
        sharding = sharding_of(parameter)
        assert sharding is not None
        return sharding.wrap(value.to(parameter.device).reshape(-1))
    local = _local(made)
    if local.numel() != value.numel():
        raise PlanError(
            f"{key}: this rank has {local.numel()} of its elements, and the same rank of the other "
            f"replica {value.numel()}; make the groups of parameters in one order in all replicas"
        )
    local.copy_(value.view(local.shape))
    return made
