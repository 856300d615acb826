"""`sleep` and `wake`: give a model's device memory back for a while, for example to generation.

``model.to("cpu")`` and ``model.to(device)`` do the same with the shards and gradients of a model.

Every tensor keeps its identity. The storage of shards, gradients and optimizer states loses its
device memory, and until `wake` their tensors view a copy in host memory::

    awake    tensor -> storage (device memory)
    asleep   tensor -> host copy      storage (empty), which flat buffers and dense parameters view
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise._private import pytree, storage_id
from shardwise.comm.device import is_accelerator, wait_for_device
from shardwise.errors import PlanError, StepError
from shardwise.local_devices import release_cached_memory
from shardwise.runtime.engine import HANDLE, Handle, Runtime
from shardwise.runtime.memory import Pool, swap_memory
from shardwise.runtime.nested import plain_tensors
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.scheduler import Sleep
from shardwise.runtime.unit import FlatParameters
from shardwise.schedule.events import EventKind

__all__ = ["Asleep", "following", "sleep", "wake"]

_UNREDUCED = "gradients of a micro-batch are not reduced yet; finish the step, then sleep"


@dataclass(frozen=True)
class Asleep:
    """What `sleep` did on this rank, in bytes.

    Attributes:
        freed_bytes: of the device, that were given back.
        host_bytes: of host memory, that the copies take.
        remaining_bytes: of the device, that buffers and unsharded parameters of the model still
            take.
    """

    freed_bytes: int
    host_bytes: int
    remaining_bytes: int


@dataclass(frozen=True)
class _Freed:
    """A storage without its memory."""

    storage: torch.UntypedStorage
    num_bytes: int
    pool: Pool  # of its device
    copy: Tensor | None  # of its bytes, on the host; None: zeros

    def restore(self) -> None:
        swap_memory(self.storage, self.pool.new_storage(self.num_bytes))
        content = _bytes_of(self.storage)
        content.zero_() if self.copy is None else content.copy_(self.copy, non_blocking=True)


@dataclass(frozen=True)
class _Moved:
    """A tensor that views a copy on the host, and the memory that it viewed before."""

    tensor: Tensor
    whole: torch.UntypedStorage  # contains the memory of the tensor's storage
    part: slice | None  # of ``whole``, in bytes: the tensor's storage, if it is another one
    offset: int  # in elements, in the tensor's storage
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, whole: torch.UntypedStorage) -> "_Moved":
        storage, part = tensor.untyped_storage(), None
        if storage_id(storage) != storage_id(whole):  # a slice of it; see `tensor.sharding`
            start = storage.data_ptr() - whole.data_ptr()
            part = slice(start, start + storage.nbytes())
        offset = int(tensor.storage_offset())
        return _Moved(tensor, whole, part, offset, tensor.shape, tensor.stride())

    def move(self, copy: Tensor | None) -> None:
        """View ``copy``, of the bytes of ``whole``, or nothing."""
        if copy is None:
            self.tensor.data = self.tensor.new_empty(0)
            return
        start = 0 if self.part is None else self.part.start // self.tensor.itemsize
        self._view(copy.untyped_storage(), start)

    def restore(self) -> None:
        """View the device again, after the memory of ``whole`` was restored."""
        part: Any = self.whole if self.part is None else self.whole[self.part]
        self._view(part, 0)

    def _view(self, storage: torch.UntypedStorage, start: int) -> None:
        empty = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        self.tensor.data = empty.set_(storage, start + self.offset, self.shape, self.stride)


@dataclass
class _Sleeper:
    """The memory of one model that sleeps."""

    optimizer: Optimizer | None
    refusal: RemovableHandle | None
    wakes_when_moved: bool = False  # it was put to sleep by ``model.to("cpu")``
    freed: list[_Freed] = field(default_factory=list)
    moved: list[_Moved] = field(default_factory=list)


_sleepers: "weakref.WeakKeyDictionary[nn.Module, _Sleeper]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def sleep(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    to: Literal["host", "discard"] = "host",
) -> Asleep:
    """Free the device memory of the model's shards, gradients, optimizer states and buffers of
    collectives, until `wake`. Every rank must call this between steps.

    The next step after `wake` has the same bits as without. While the model sleeps, `sw.gathered`,
    `sw.full_tensors`, `sw.publish`, `sw.save` and `sw.load` use the host copy; forward,
    backward and ``optimizer.step()`` raise. The model's own buffers stay, because calls inside
    `sw.gathered` use them. Shards in host memory (`CPUOffloadPolicy`) stay as well.

    Args:
        model: the root of a sharded model.
        optimizer: the optimizer of its parameters; None if it has no states, or keeps them.
        to: ``"host"`` copies all values to host memory (page-locked, for a GPU). ``"discard"``
            drops them: after `wake` all are zero, and `sw.load` has to restore them.

    Returns:
        The bytes that were freed, and those that remain.

    Raises:
        StepError: a forward, backward or `sw.gathered` is running, gradients wait for a reduction,
            or the model sleeps already.
        PlanError: the model is not sharded, or ``to`` is another word.
    """
    if to not in ("host", "discard"):
        raise PlanError(f"to={to!r}: expected 'host' or 'discard'")
    runtimes = _runtimes_in(model)
    for runtime in runtimes:
        scheduler = runtime.scheduler
        scheduler.check_idle("a model cannot sleep in the middle of a step")
        scheduler.check_awake()
        if scheduler.sequencer.has_unreduced_gradients:
            raise StepError(_UNREDUCED)
    refusal = None if optimizer is None else optimizer.register_step_pre_hook(_refuse_step)
    sleeper = _sleepers[model] = _Sleeper(optimizer, refusal)
    state = Sleep.ON_HOST if to == "host" else Sleep.DISCARDED
    try:
        freed = sum(_put_to_sleep(runtime, sleeper, state) for runtime in runtimes)
    except BaseException:  # such as too little host memory
        wake(model, optimizer)
        raise
    freed += sum(one.num_bytes for one in sleeper.freed)
    host_bytes = sum(one.num_bytes for one in sleeper.freed if one.copy is not None)
    return Asleep(freed, host_bytes, _remaining_bytes(model))


@torch.no_grad()
def wake(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Allocate the device memory that `sleep` has freed, and copy the values back.

    Raises:
        StepError: the model does not sleep.
        PlanError: it was put to sleep with another optimizer.
    """
    sleeper = _sleepers.get(model)
    if sleeper is None:
        asleep = any(one.scheduler.sleep is not Sleep.AWAKE for one in _runtimes_in(model))
        raise StepError(
            "it was put to sleep as a part of another module; pass that one"
            if asleep
            else "the model does not sleep; call sw.sleep first"
        )
    if sleeper.optimizer is not optimizer:
        raise PlanError("wake: expected the optimizer that was passed to sw.sleep")
    for one in sleeper.freed:
        one.restore()
    for moved in sleeper.moved:
        moved.restore()
    for runtime in _runtimes_in(model):
        wait_for_device(runtime.pools.device)  # the copies on the host are freed now
        runtime.scheduler.sleep = Sleep.AWAKE
    if sleeper.refusal is not None:
        sleeper.refusal.remove()
    del _sleepers[model]  # last: after an interrupt, `wake` may be called again


@contextlib.contextmanager
def following(
    model: nn.Module, fn: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Put the sharded ``model`` to sleep if ``fn`` moves it to the host, and wake it afterwards.

    Shards that `CPUOffloadPolicy` keeps in host memory stay there, with their gradients.

    Args:
        model: the module on which `nn.Module._apply` was called with ``fn``.
        fn: converts or moves a tensor.

    Returns:
        What `nn.Module._apply` should call instead.

    Raises:
        StepError: ``fn`` changes dtypes, and the model sleeps; or as `sleep`.
    """
    handle: Handle | None = vars(model).get(HANDLE)
    if handle is None or handle.index or not is_accelerator(handle.runtime.pools.device):
        yield fn
        return
    scheduler, device = handle.runtime.scheduler, handle.runtime.pools.device
    is_awake = scheduler.sleep is Sleep.AWAKE
    before = torch.empty(0, device=device if is_awake else "cpu")
    after = fn(before)
    on_device = any(one.local.device == device for one in scheduler.parameters)
    if is_awake and after.device.type == "cpu" and on_device and scheduler.is_between_steps:
        sleep(model)
        _sleepers[model].wakes_when_moved = True
    elif not is_awake and after.device == device:
        sleeper = _sleepers.get(model)
        if sleeper is not None and sleeper.wakes_when_moved:
            wake(model)
    if scheduler.sleep is Sleep.AWAKE:
        on_host = _ids(one for one in scheduler.parameters if one.local.device != device)

        def keep_on_host(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in on_host or moved.device != device:
                return moved
            return tensor if moved.dtype == tensor.dtype else moved.to("cpu")

        yield keep_on_host
        return
    if after.dtype != before.dtype:
        scheduler.check_awake()
    runtimes = _runtimes_in(model)
    asleep = _ids(one for each in runtimes for one in each.scheduler.parameters)
    yield lambda tensor: tensor if id(tensor) in asleep else fn(tensor)
    for flat in (flat for each in runtimes for unit in each.units for flat in unit.flats):
        flat.reclaim_locals()  # `nn.Module._apply` has detached them


def _ids(parameters: Iterable[FSDPParameter]) -> set[int]:
    """The ids of the sharded parameters and of their gradients."""
    return {id(tensor) for one in parameters for tensor in (one.sharded, one.sharded.grad)}


def _runtimes_in(model: nn.Module) -> list[Runtime]:
    """The runtimes of all units in ``model``, which may be wrapped, as by FSDP1's class.

    Raises:
        PlanError: there is none.
    """
    handles: list[Handle] = [vars(m)[HANDLE] for m in model.modules() if HANDLE in vars(m)]
    if not handles:
        raise PlanError(f"{type(model).__name__} is not sharded; call sw.fully_shard on it first")
    roots = {handle.runtime for handle in handles if handle.index == 0}
    for handle in handles:
        if handle.runtime not in roots:
            name = handle.runtime.plan.units[handle.index].name
            raise PlanError(f"{name} is a unit inside a sharded model; pass the whole model")
    return list(dict.fromkeys(handle.runtime for handle in handles))


def _refuse_step(*_: Any) -> None:
    raise StepError("the optimizer sleeps; call sw.wake(model, optimizer) first")


def _put_to_sleep(runtime: Runtime, sleeper: _Sleeper, state: Sleep) -> int:
    """Move the values of a model to the host, and free their device memory.

    Returns the bytes of idle memory that were freed as well.
    """
    device, pools = runtime.pools.device, tuple(runtime.pools)
    for index in range(len(runtime.units)):  # some may be kept from the last forward
        runtime.scheduler.request(EventKind.FREE, index)
    tensors = {id(x): x for x in _tensors(runtime, sleeper.optimizer) if x.device == device}
    for one in chain.from_iterable(each.moved for each in _sleepers.values()):
        tensors.pop(id(one.tensor), None)  # a state that was moved with another model
    moved = _with_storages([one for one in tensors.values() if one.untyped_storage().nbytes()])
    storages = {storage_id(one.whole): one.whole for one in moved}
    keeps_values = state is Sleep.ON_HOST
    copies = {key: _copy(one) if keeps_values else None for key, one in storages.items()}
    wait_for_device(device)
    sleeper.moved += moved
    for one in moved:
        one.move(copies[storage_id(one.whole)])
    for unit in runtime.units:
        for flat in unit.flats:
            kept = () if flat.gradients is None else flat.gradients.release_idle_memory()
            for storage in (*kept, *flat.codec.kept_memory()):  # without values
                storages.setdefault(storage_id(storage), storage)
    for key, storage in storages.items():
        sleeper.freed.append(_Freed(storage, storage.nbytes(), runtime.pools.own, copies.get(key)))
        swap_memory(storage, runtime.pools.own.new_storage(0))
    idle_bytes = sum(pool.held_bytes for pool in pools)
    for pool in pools:
        pool.free_idle()
    release_cached_memory(device)
    runtime.scheduler.sleep = state
    return idle_bytes - sum(pool.held_bytes for pool in pools)


def _with_storages(tensors: Sequence[Tensor]) -> list[_Moved]:
    """The storage that contains each tensor. The storages of some are slices of others."""
    moved: list[_Moved] = []
    whole, end = tensors[0].untyped_storage() if tensors else None, 0
    in_order = [(x.untyped_storage().data_ptr(), -x.untyped_storage().nbytes(), x) for x in tensors]
    for start, num_bytes, tensor in sorted(in_order, key=lambda entry: entry[:2]):
        if start >= end:
            whole, end = tensor.untyped_storage(), start - num_bytes
        assert whole is not None
        assert start - num_bytes <= end, "storages overlap only as slices"
        moved.append(_Moved.of(tensor, whole))
    return moved


def _tensors(runtime: Runtime, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """All tensors with values that the next step needs, unless they are on the host."""
    on_host: set[int] = set()
    for unit in runtime.units:
        for flat in unit.flats:
            flat.reclaim_locals()
            if not unit.plan.offloads_gradients:
                yield from _tensors_of(flat)
            if unit.plan.offload is not None:
                on_host.update(id(one.sharded) for one in flat.parameters)
    for parameter, state in () if optimizer is None else optimizer.state.items():
        leaves = () if id(parameter) in on_host else pytree.tree_leaves(state)
        yield from chain.from_iterable(plain_tensors(x) for x in leaves if isinstance(x, Tensor))


def _tensors_of(flat: FlatParameters) -> Iterator[Tensor]:
    """The shard, its gradients, and what a quantized reduction keeps."""
    yield flat.codec.shard
    for parameter in flat.parameters:
        yield from plain_tensors(parameter.local)
        if parameter.sharded.grad is not None:
            yield from plain_tensors(parameter.sharded.grad)
    if flat.gradients is not None and flat.gradients.residual is not None:
        yield flat.gradients.residual


def _copy(storage: torch.UntypedStorage) -> Tensor:
    """Begin to copy the bytes of a storage to host memory."""
    content = _bytes_of(storage)
    pinned = is_accelerator(content.device)
    host = torch.empty(content.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return host.copy_(content, non_blocking=pinned)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _remaining_bytes(model: nn.Module) -> int:
    """The bytes of the model's buffers, and of its parameters that are not sharded."""
    plain = [*model.buffers(), *(p for p in model.parameters() if type(p) is nn.Parameter)]
    return sum({storage_id(one.untyped_storage()): one.nbytes for one in plain}.values())
