"""Replaces the accelerator by a simulation, for torch and for shardwise.

Tensors of the simulated device are CPU tensors that report the device ``cuda``. Everything that
would reach the driver is replaced: factories with a ``device``, copies between devices, reads by
the host, streams and events, and the process groups that shardwise creates.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from shardwise import local_devices
from shardwise._private import AsyncCollectiveTensor, current_graph_task, new_empty_subclass
from shardwise.comm import communicator, device as comm_device, groups, process_group
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.features import collective_memory
from shardwise.runtime import accumulation, memory as runtime_memory
from shardwise.runtime.memory import Pool
from shardwise.watch import ranks
from shardwise.watch.monitor import Patience
from tests.streams.clock import Event, Stream
from tests.streams.memory import HOST, PINNED, Place
from tests.streams.raw import poison_bytes
from tests.streams.recorder import Creation, Recorder
from tests.streams.simulation import Simulation, location
from tests.streams.strict_group import StrictGroup

__all__ = ["Simulated", "simulated"]

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_CPU = torch.device("cpu")


class Simulated:
    """An installed simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._creation = Creation()

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Record the operators of the calling thread."""
        with Recorder(self.simulation, self._creation):
            yield

    def place(self, device: torch.device | str | int | None, *, is_pinned: bool) -> Place | None:
        """The place of a factory's result; None: that of its operands."""
        if device is None:
            return PINNED if is_pinned else None
        if isinstance(device, int):
            return Place(torch.device("cuda", device))
        asked = torch.device(device)
        if asked.type == "cpu":
            return PINNED if is_pinned else HOST
        return Place(self.simulation.current_stream(asked).device)

    # -- devices of tensors -----------------------------------------------------------------------

    def device_of(self, tensor: Tensor) -> torch.device:
        real = torch._C.TensorBase.device.__get__(tensor)
        if real.type != "cpu":
            return real
        if isinstance(tensor, DTensor):
            return self.device_of(tensor._local_tensor)
        if isinstance(tensor, AsyncCollectiveTensor):
            return self.device_of(tensor.elem)
        return self.simulation.place_of(tensor).device

    def factory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.pop("device", None)
            is_pinned = kwargs.pop("pin_memory", False)
            if _is_meta(device):
                return original(*args, device=device, **kwargs)
            place = self.place(device, is_pinned=is_pinned)
            with self._creation.at(place):
                made = original(*args, **kwargs)
            if place is not None and place.is_device and original.__name__ == "tensor":
                self.simulation.synchronize(place.device)  # a copy from memory of Python
            return made

        return make

    def to(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kw: Any) -> Tensor:
        """Replaces `Tensor.to`, for copies between places."""
        options = _options_of_to(args) | kw
        device = options.pop("device", None)
        if _is_meta(device):
            return original(tensor, device=device, **options)
        place = self.place(device, is_pinned=False)
        moves = type(tensor) in _PLAIN or isinstance(tensor, DTensor)
        if place is None or place.device == self.device_of(tensor) or not moves:
            return original(tensor, **options)
        with self._creation.at(place, is_async=options.pop("non_blocking", False)):
            return original(tensor, **{**options, "copy": True})

    def grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the grouping by device of optimizers and clipping, which C++ does."""

        def group(lists: Any, *args: Any) -> Any:
            groups = original(lists, *args)
            first = {key: next(one for one in some[0][0]) for key, some in groups.items()}
            return {(self.device_of(first[key]), key[1]): some for key, some in groups.items()}

        return group

    def backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """Runs backward on a separate thread, as autograd does for a device."""

        def run(*args: Any, **kwargs: Any) -> None:
            if current_graph_task() != -1:  # a nested backward runs on the same thread
                original(*args, **kwargs)
                return
            stream = self.simulation.current_stream(self.simulation.model_device)

            def on_thread() -> None:
                with self.thread(), stream:
                    original(*args, **kwargs)

            with ThreadPoolExecutor(1) as thread:
                thread.submit(on_thread).result()

        return run

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Replaces `swap_storages` where storages cannot be swapped."""
        simulation = self.simulation
        place = simulation.memory.place_of(storage)
        if place is None:
            storage.resize_(num_bytes)
            return
        simulation.memory.resize(storage, num_bytes, simulation.timeline_for([place]))
        if simulation.is_late:
            poison_bytes(storage.data_ptr(), num_bytes)

    def read(self, tensor: Tensor, what: str) -> None:
        """Record that the host reads ``tensor`` without an operator."""
        if type(tensor) not in _PLAIN:
            return
        simulation = self.simulation
        timeline = simulation.timeline_for([simulation.place_of(tensor)])
        number = simulation.begin(timeline)
        simulation.use(tensor, timeline, number, f"{what} in {location()}", is_write=False)
        if isinstance(timeline, Stream):  # the tensor is copied to the host
            timeline.synchronize()


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_meta(device: torch.device | str | int | None) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _options_of_to(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments of `Tensor.to` by name."""
    options: dict[str, Any] = {}
    flags = iter(("non_blocking", "copy"))
    for value in args:
        if isinstance(value, bool):
            options[next(flags)] = value
        elif isinstance(value, torch.dtype):
            options["dtype"] = value
        elif isinstance(value, Tensor):
            options |= {"device": value.device, "dtype": value.dtype}
        elif value is not None:
            options["device"] = value
    return options


@contextmanager
def simulated(
    simulation: Simulation, *, exchanges: bool = True, patience: Patience | None = None
) -> Iterator[Simulated]:
    """Use ``simulation`` as ``cuda`` inside the block.

    Args:
        simulation: the devices of this rank.
        exchanges: whether collectives move bytes; if not, the other ranks need not exist.
        patience: of ranks that monitor each other; None: they do not.
    """
    installed = Simulated(simulation)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda _tensor: False)  # of a GRU
        _install_tensors(installed, patch)
        _install_comm(installed, patch, exchanges=exchanges)
        if patience is None:
            patch.setattr(ranks, "Monitor", _Monitor)
            patch.setattr(ranks, "connect_to_store", lambda _patience: None)
        else:
            patch.setattr(ranks, "usual_patience", lambda: patience)
        if simulation.is_late:
            _poison_pools(patch)
        stack.callback(simulation.memory.close)
        with installed.thread():
            yield installed
            simulation.finish()


def _install_tensors(installed: Simulated, patch: pytest.MonkeyPatch) -> None:
    simulation = installed.simulation
    _device_constructors()  # caches the original factories, for `with torch.device(...)`
    patch.setattr(Tensor, "device", property(installed.device_of), raising=False)
    patch.setattr(
        Tensor, "is_cuda", property(lambda t: installed.device_of(t).type == "cuda"), raising=False
    )
    original_to, original_list = Tensor.to, Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        installed.read(tensor, "tolist")
        return original_list(tensor)

    def numpy(tensor: Tensor, **options: Any) -> Any:
        if installed.device_of(tensor).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        installed.read(tensor, "numpy")
        return torch._C.TensorBase.numpy(tensor, **options)

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:  # noqa: ARG001
        return simulation.place_of(tensor) == PINNED

    patch.setattr(torch.autograd, "backward", installed.backward(torch.autograd.backward))
    patch.setattr(Tensor, "to", lambda t, *a, **k: installed.to(original_to, t, *a, **k))
    patch.setattr(Tensor, "cpu", lambda t: t.to("cpu"), raising=False)
    patch.setattr(Tensor, "cuda", lambda t, d=None, **k: t.to(d or "cuda", **k), raising=False)
    patch.setattr(Tensor, "tolist", tolist, raising=False)
    patch.setattr(Tensor, "numpy", numpy, raising=False)

    def record_stream(tensor: Tensor, _stream: Stream) -> None:
        block = simulation.memory.block_at(tensor.data_ptr())
        if block is not None:
            block.is_recorded = True

    patch.setattr(Tensor, "record_stream", record_stream, raising=False)
    patch.setattr(Tensor, "is_pinned", is_pinned, raising=False)
    for module in (clip_grad, torch_optimizer):
        name = "_group_tensors_by_device_and_dtype"
        patch.setattr(module, name, installed.grouping(getattr(module, name)))
    patch.setattr(  # for gradients without elements
        accumulation,
        "new_empty_subclass",
        lambda kind, shape, dtype, _device: new_empty_subclass(kind, shape, dtype, _CPU),
    )
    for name in _FACTORIES:
        patch.setattr(torch, name, installed.factory(getattr(torch, name)))


def _install_comm(installed: Simulated, patch: pytest.MonkeyPatch, *, exchanges: bool) -> None:
    simulation = installed.simulation

    def new_group(ranks: Any, *args: Any, without_kernels: bool = False) -> StrictGroup:
        *_, name, _timeout = args
        simulation.groups.append((tuple(ranks), name))
        if without_kernels:
            simulation.groups_without_kernels.add(name)
        return StrictGroup(simulation, list(ranks), name, exchanges=exchanges)

    def allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        place = installed.place(device, is_pinned=False) or HOST
        owner = simulation.timeline_for([place])
        simulation.memory.add(storage, place, owner, "a pool")
        return storage

    def register(num_bytes: int, device: torch.device, *, is_symmetric: bool) -> Tensor:
        storage = allocate(num_bytes, device)
        simulation.register(storage, is_symmetric=is_symmetric)
        with _disable_current_modes():
            return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))

    def tensor_allocator(_group: Any, device: torch.device) -> Callable[[int], Tensor]:
        return lambda num_bytes: register(num_bytes, device, is_symmetric=False)

    def symmetric_tensor(n: int, _group: Any, device: torch.device, together: Any) -> Tensor:
        with together:
            return register(n, device, is_symmetric=True)

    def swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        original_swap(one, other)
        simulation.memory.swap(one, other)

    original_swap = vars(runtime_memory)["swap_storages"]
    patch.setattr(runtime_memory, "_allocate", allocate)
    patch.setattr(runtime_memory, "swap_storages", swap)
    patch.setattr(runtime_memory, "_resize", installed.resize)
    patch.setattr(comm_device, "torch", torch_on(installed))
    patch.setattr(local_devices, "torch", torch_on(installed))
    patch.setattr(comm_device, "_used_streams", {})
    # Communicators that exist have streams of other simulations.
    patch.setattr(communicator, "_communicators", weakref.WeakKeyDictionary())
    patch.setattr(groups, "new_registered_group", new_group)
    patch.setattr(groups, "new_nccl_group", new_group)
    patch.setattr(groups, "dist", _Distributed())
    for module in (process_group, collective_memory):
        patch.setattr(module, "tensor_allocator", tensor_allocator)
    patch.setattr(collective_memory, "has_symmetric_memory", lambda *_: True)
    patch.setattr(process_group, "symmetric_tensor", symmetric_tensor)
    if not exchanges:
        patch.setattr(ProcessGroupCollectives, "_check_same", lambda *_: None)
        patch.setattr(ProcessGroupCollectives, "_meet", lambda *_: None)


def _poison_pools(patch: pytest.MonkeyPatch) -> None:
    """Make pools fill memory with NaN when it is allocated and when it is freed."""

    def poison(storage: torch.UntypedStorage) -> None:
        poison_bytes(storage.data_ptr(), storage.nbytes())

    allocate, free = Pool.allocate, Pool.free

    def poisoned(pool: Pool, num_bytes: int, owner: str = "") -> torch.UntypedStorage:
        storage = allocate(pool, num_bytes, owner)
        poison(storage)
        return storage

    def poison_and_free(pool: Pool, storage: torch.UntypedStorage, **options: bool) -> None:
        poison(storage)
        free(pool, storage, **options)

    patch.setattr(Pool, "allocate", poisoned)
    patch.setattr(Pool, "free", poison_and_free)


class _Monitor:
    """A `Monitor` that finds no errors."""

    def __init__(self, *_args: Any) -> None:
        pass

    def publish(self, _report: Any) -> None:
        pass

    def check_reports(self, _epoch: int) -> None:
        pass

    def check_heartbeats(self, _where: str = "") -> None:
        pass

    def is_first(self, *_what: Any) -> bool:
        return False


class _Distributed:
    """`torch.distributed`, with NCCL as the backend of the device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend_config(self, _group: Any) -> str:
        return "cpu:gloo,cuda:nccl"


def torch_on(installed: Simulated) -> Any:
    """Return the `torch` that `comm.device` and `local_devices` use."""
    simulation = installed.simulation

    def new_stream(device: Any = None, priority: int = 0) -> Stream:  # noqa: ARG001
        return simulation.new_stream(device)

    def new_event(device: Any = None, **_options: Any) -> Event:  # noqa: ARG001
        return Event(simulation)

    def set_device(device: torch.device | int) -> None:
        simulation.current_device = device if isinstance(device, int) else device.index

    def empty_cache() -> None:
        simulation.num_emptied_caches += 1

    common = {
        "empty_cache": empty_cache,
        "Stream": new_stream,
        "Event": new_event,
        "current_stream": simulation.current_stream,
        "set_device": set_device,
        "set_device_index": set_device,
        "current_device": lambda: simulation.current_device,
        "current_device_index": lambda: simulation.current_device,
        "current_accelerator": lambda *_: torch.device("cuda"),
        "device_count": lambda: simulation.num_devices,
        "is_available": lambda: True,
        "synchronize": simulation.synchronize,
        "stream": lambda stream: stream,
        "get_rng_state": lambda _device: torch.get_rng_state(),
        "set_rng_state": lambda state, _device: torch.set_rng_state(state),
        "max_memory_allocated": lambda _device: 0,
        "memory_allocated": lambda _device: 0,
        "memory_stats": lambda _device: {},
    }
    module = SimpleNamespace(**common)
    return _Torch(
        {
            "cuda": module,
            "accelerator": module,
            "Stream": new_stream,
            "Event": new_event,
            "get_device_module": lambda *_: module,
        }
    )


class _Torch:
    """`torch` with some names replaced."""

    def __init__(self, names: dict[str, Any]) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
