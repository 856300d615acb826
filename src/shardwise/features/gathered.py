"""`sw.gathered`: whole parameters between steps, which may be changed on all ranks."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _private
from shardwise.comm.api import Work
from shardwise.comm.communicator import Collectives
from shardwise.comm.device import copy_, join_streams, wait_for_device
from shardwise.errors import PlanError, StepError
from shardwise.features.checks import check_same_sums, checksum
from shardwise.runtime import hooks
from shardwise.runtime.buffers import flat_buffer
from shardwise.runtime.memory import Pool
from shardwise.runtime.module import runtimes_in, set_managed
from shardwise.runtime.parameters import FSDPParameter, parameter_like
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.unit import FlatParameters
from shardwise.runtime.versions import versions_of
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["gathered", "holding"]

Versions = tuple[int, int]  # see `versions_of`
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
    held = _hold(scheduler)
    changed: set[str] | None = None  # names of parameters, if changes are written back
    try:
        after: Sums | None = None
        try:
            before = _sums_of(held) if write_back else {}
            yield
            after = _collect_changes(held) if write_back else {}
            if write_back:
                changed = _agreed_changes(before, after)
        except BaseException as error:
            # Other ranks wait to compare checksums, unless all of them raise this error.
            if write_back and (after is None or not isinstance(error, PlanError)):
                scheduler.abort(error)
            raise
    finally:
        scheduler.in_gathered = False
        try:
            _release(scheduler, held, changed)
        except BaseException as error:  # an interrupt
            scheduler.fail(error)
            raise
        finally:
            scheduler.end_gathered(changed or ())


class HeldLayout:
    """The whole parameters of one layout, in the dtype of its shard.

    They are in a separate buffer, unless their classes define how they are gathered.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._versions: list[Versions] = []  # of the sharded parameters, when they were replaced

    def launch_gather(self, collectives: Collectives, label: str) -> Work:
        flat = self._flat
        if not flat.codec.can_split:
            return flat.launch_gather(collectives, label)
        flat.reclaim_locals()
        pool = Pool(flat.codec.buffer.flat.device, keep=False)
        held = flat.held = flat_buffer(flat.layout, pool)
        held.acquire()
        fill = partial(copy_, held.slot_of(flat.mesh.rank), flat.codec.shard)
        return collectives.all_gather(held.flat, flat.mesh.shards, label, fill)

    def show(self) -> None:
        """Put the gathered parameters into the modules, after the collective."""
        flat, held = self._flat, self._flat.held
        if held is None:
            flat.finish_gather()
            for parameter in flat.parameters:
                parameter.use_unsharded()
            return
        held.unpack()
        self._versions = [versions_of(parameter) for parameter in flat.parameters]
        for parameter, view in zip(flat.parameters, held.views, strict=True):
            _show(parameter, view)

    def parameters(self) -> Iterator[tuple[FSDPParameter, Versions, Tensor]]:
        """Every parameter that can be written back, with its versions and view [shape]."""
        if self._flat.held is None:
            self._flat.codec.check_unchanged()
        else:
            views = self._flat.held.views
            yield from zip(self._flat.parameters, self._versions, views, strict=True)

    def write_back(self) -> torch.device | None:
        """Copy this rank's part to the shard; return the device to wait for, if any."""
        flat, held = self._flat, self._flat.held
        if held is None:
            return None
        for parameter, view in zip(flat.parameters, held.views, strict=True):
            local, own = parameter.local.data, parameter.sharding.own_part_of(view)
            copy_(local, own.reshape(local.shape))
        return held.flat.device if held.flat.device != flat.codec.shard.device else None

    def release(self) -> None:
        """Free the memory, unless other code holds parameters, in a state dict, say."""
        flat, held = self._flat, self._flat.held
        if held is None:
            flat.free()
            return
        join_streams(held.flat.device, mutually=True)
        flat.held = None


def _hold(scheduler: Scheduler) -> list[HeldLayout]:
    """Gather every unit, and put those parameters into the modules."""
    held = {flat: HeldLayout(flat) for unit in scheduler.units for flat in unit.flats}
    was_idle = scheduler.is_between_steps
    try:
        with scheduler.gathering_apart() as comm:
            for unit in scheduler.units:
                label = f"hold {unit.plan.label}"
                works = (held[flat].launch_gather(comm.gather, label) for flat in unit.flats)
                unit.gather_apart(works)
            for unit in scheduler.units:
                unit.await_apart(comm)
                for flat in unit.flats:
                    held[flat].show()
        return list(held.values())
    except BaseException as error:
        if was_idle and scheduler.in_gathered:  # an interrupt
            scheduler.in_gathered = False
            scheduler.fail(error)
        raise


def _release(scheduler: Scheduler, held: Sequence[HeldLayout], changed: set[str] | None) -> None:
    """Free what `_hold` gathered; write it back unless ``changed``, the names, is None."""
    with _private.without_transforms():
        try:
            _put_back(scheduler, held, changed)
        except BaseException:  # an interrupt: the other ranks write everything
            _put_back(scheduler, held, changed)
            raise
        for each in held:
            each.release()


def _put_back(scheduler: Scheduler, held: Sequence[HeldLayout], changed: set[str] | None) -> None:
    for unit in scheduler.units:
        unit.use_sharded()
    if changed is not None:
        for device in {each.write_back() for each in held}:
            if device is not None:
                wait_for_device(device)  # until shards on the host are written


@torch.no_grad()
def _collect_changes(held: Sequence[HeldLayout]) -> Sums:
    """Copy the tensors of the modules into the held buffers, and return their checksums.

    Shards do not change, so nothing is written if this raises or if ranks differ.
    """
    assigned = [
        (view, _assigned(parameter, versions, view))
        for each in held
        for parameter, versions, view in each.parameters()
    ]
    for view, tensor in assigned:
        if tensor is not None:
            view.copy_(tensor)
    return _sums_of(held)


def _sums_of(held: Sequence[HeldLayout]) -> Sums:
    """Checksums of the held buffers."""
    sums: Sums = {}
    for parameter, _, view in (each for one in held for each in one.parameters()):
        of_mesh = sums.setdefault(parameter.sharding.mesh, {})
        flat = view.detach().reshape(-1)
        # Almost surely, this also detects a different order of elements.
        of_mesh[parameter.name] = checksum(flat) + 31 * checksum(flat[::2])
    return sums


def _agreed_changes(before: Sums, after: Sums) -> set[str]:
    """Return the names of parameters whose checksums have changed.

    Raises:
        PlanError: ranks have different checksums.
    """
    changed = {
        name
        for mesh, of_mesh in after.items()
        for name, value in of_mesh.items()
        if not torch.equal(value, before[mesh][name])
    }
    for mesh, of_mesh in after.items():  # last, as other ranks write after it
        check_same_sums(of_mesh, mesh, _ADVICE)
    return changed


def _show(parameter: FSDPParameter, tensor: Tensor) -> None:
    """Put ``tensor`` [shape] into the modules."""
    held = parameter_like(parameter.sharded, parameter.sharding.dense(tensor))
    hooks.on_gradient(held, partial(_refuse_gradient, parameter.name))
    parameter.show(held)


def _refuse_gradient(name: str) -> None:
    raise StepError(
        f"{name}: received a gradient inside sw.gathered, where it would be lost; call "
        "backward outside, or differentiate copies of the parameters by torch.func"
    )


def _assigned(parameter: FSDPParameter, versions: Versions, view: Tensor) -> Tensor | None:
    """The tensor that the modules hold, if it is not ``view``."""
    tensor = _held_by_modules(parameter, versions)
    if tensor is None:
        return None
    if tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride():
        return None
    # Two parameters may have exchanged their memory, as in `p.data, q.data = q.data, p.data`.
    is_view = tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    return tensor.clone() if is_view else tensor


def _held_by_modules(parameter: FSDPParameter, versions: Versions) -> Tensor | None:
    """The dense tensor [shape] that the modules hold; None if they were deleted.

    ``versions`` are those of the sharded parameter when it was replaced.
    """
    if versions_of(parameter) != versions:
        raise PlanError(
            f"{parameter.name}: its shard was changed inside sw.gathered(write_back=True), perhaps "
            "by an optimizer, and the gathered value would overwrite the change; step outside"
        )
    held = [tensor for owner in parameter.owners if (tensor := owner.get()) is not None]
    if not held:
        return None
    if any(tensor is not held[0] for tensor in held):
        raise PlanError(
            f"{', '.join(parameter.spec.names)}: these names of one tied parameter hold different "
            "tensors; assign the same nn.Parameter to each of them"
        )
    tensor = parameter.sharding.local_of_dense(held[0])
    dtype, shape = parameter.local.dtype, parameter.spec.shape
    is_dense = not (tensor.is_meta or isinstance(tensor, DTensor))
    if not is_dense or (tensor.dtype, tensor.shape) != (dtype, shape):
        got = f"a {type(tensor).__name__} of {tensor.dtype} {tuple(tensor.shape)}"
        raise PlanError(
            f"{parameter.name}: expected a tensor of {dtype} {shape} at the end of "
            f"sw.gathered(write_back=True), got {got} on {tensor.device}; keep shape and dtype, or "
            "drop write_back"
        )
    return tensor.detach()
