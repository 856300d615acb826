"""Collects changes to whole parameters at the end of `sw.gathered(write_back=True)`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.runtime.checks import check_same_sums, checksum
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import Unit
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["agreed_changes", "collect_changes", "sums_of"]

Sums = dict[DataParallelMesh, dict[str, Tensor]]  # checksums by the ranks that share a parameter

_ADVICE = (
    "every rank has to make the same change inside sw.gathered(write_back=True); for random values "
    "call torch.manual_seed with one seed on every rank"
)


@torch.no_grad()
def collect_changes(units: Sequence[Unit]) -> Sums:
    """Copy the tensors of the modules into the held buffers, and return their checksums.

    Shards do not change, so nothing is written if this raises or if ranks differ.
    """
    assigned = [(view, _assigned(parameter, view)) for parameter, view in _held(units)]
    for view, tensor in assigned:
        if tensor is not None:
            view.copy_(tensor)
    return sums_of(units)


def sums_of(units: Sequence[Unit]) -> Sums:
    """Checksums of the held buffers."""
    sums: Sums = {}
    for parameter, view in _held(units):
        of_mesh = sums.setdefault(parameter.sharding.mesh, {})
        of_mesh[parameter.name] = _position_checksum(view.detach())
    return sums


def agreed_changes(before: Sums, after: Sums) -> set[str]:
    """Return the names of parameters whose checksums have changed.

    Raises:
        PlanError: ranks have different checksums.
    """
    for mesh, of_mesh in after.items():
        check_same_sums(of_mesh, mesh, _ADVICE)
    return {
        name
        for mesh, of_mesh in after.items()
        for name, value in of_mesh.items()
        if not torch.equal(value, before[mesh][name])
    }


def _held(units: Sequence[Unit]) -> list[tuple[FSDPParameter, Tensor]]:
    return [pair for unit in units for flat in unit.flats for pair in flat.held_parameters()]


def _assigned(parameter: FSDPParameter, view: Tensor) -> Tensor | None:
    """The tensor that the modules hold, if it is not ``view``."""
    tensor = parameter.assigned_tensor()
    if tensor is None:
        return None
    if tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride():
        return None
    # Two parameters may have exchanged their memory, as in `p.data, q.data = q.data, p.data`.
    is_view = tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    return tensor.clone() if is_view else tensor


def _position_checksum(tensor: Tensor) -> Tensor:
    """A checksum that almost surely also detects a different order of elements."""
    return checksum(tensor) + 31 * checksum(tensor.reshape(-1)[::2])
