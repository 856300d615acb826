"""`sw.gathered`: whole parameters between steps, which may be changed on all ranks."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise import _private
from shardwise.features.checks import check_same_sums, checksum
from shardwise.runtime.module import runtimes_in, set_managed
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.unit import Unit
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["gathered", "holding"]

Sums = dict[DataParallelMesh, dict[str, Tensor]]  # checksums by the ranks that share a parameter

_ADVICE = (
    "every rank has to make the same change inside sw.gathered(write_back=True); for random values "
    "call torch.manual_seed with one seed on every rank"
)


@contextlib.contextmanager
def gathered(module: nn.Module, *, write_back: bool = False) -> Iterator[None]:
    """Gather all parameters of the model as plain tensors. Every rank has to enter.

    The model can run forward inside, without gradients.

    Args:
        module: a sharded model, or a unit of one. Models inside it that are sharded over other
            ranks are gathered, too.
        write_back: keep the parameters that the modules hold at the end, changed in place or
            assigned. All ranks have to make the same change. If any rank raises, no rank writes.
            Without it, changes are dropped.

    Raises:
        StepError: a forward or backward is running.
        PlanError: a change does not fit the shards, or differs between ranks.
    """
    with contextlib.ExitStack() as stack:
        for runtime in runtimes_in(module):
            stack.enter_context(holding(runtime.scheduler, write_back=write_back))
        _private.set_managed(module, is_managed=False)  # each rank may call the model alone
        try:
            yield
        finally:
            set_managed(module)


@contextlib.contextmanager
def holding(scheduler: Scheduler, *, write_back: bool) -> Iterator[None]:
    """Keep every unit gathered in separate buffers; see `gathered`."""
    scheduler.hold()
    changed: set[str] | None = None  # names of parameters, if changes are written back
    try:
        before = _sums_of(scheduler.units) if write_back else {}
        try:
            yield
            after = _collect_changes(scheduler.units) if write_back else {}
        except BaseException as error:
            if write_back:  # other ranks are waiting to compare checksums
                scheduler.abort(error)
            raise
        if write_back:
            changed = _agreed_changes(before, after)
    finally:
        scheduler.release_hold(changed)


@torch.no_grad()
def _collect_changes(units: Sequence[Unit]) -> Sums:
    """Copy the tensors of the modules into the held buffers, and return their checksums.

    Shards do not change, so nothing is written if this raises or if ranks differ.
    """
    assigned = [(view, _assigned(parameter, view)) for parameter, view in _held(units)]
    for view, tensor in assigned:
        if tensor is not None:
            view.copy_(tensor)
    return _sums_of(units)


def _sums_of(units: Sequence[Unit]) -> Sums:
    """Checksums of the held buffers."""
    sums: Sums = {}
    for parameter, view in _held(units):
        of_mesh = sums.setdefault(parameter.sharding.mesh, {})
        of_mesh[parameter.name] = _position_checksum(view.detach())
    return sums


def _agreed_changes(before: Sums, after: Sums) -> set[str]:
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
