"""What shardwise asks of torch's accelerator API and of NCCL, call by call, on one rank."""

import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from shardwise import _private, local_devices
from shardwise.comm import device as devices
from shardwise.comm.api import RankGroup
from shardwise.comm.device import DeviceStream, device_of
from shardwise.comm.groups import new_group
from tests.gpu.registry import Context, check

ONE = "one rank"
CARD = ("cuda",)
BYTES = 1 << 20


@check(ONE, "events and streams of the accelerator API", {"kinds": CARD})
def _events(context: Context) -> None:
    device = device_of(context.device)
    stream = device.new_stream()
    assert stream != device.current_stream()
    assert device.current_stream().device == context.device
    began = time.perf_counter()
    with device.use(stream):
        assert device.current_stream() == stream
        x = torch.randn(4096, 4096, device=context.device)
        first = device.record_time(stream)
        x = x @ x
        second = device.record_time(stream)
    assert device.current_stream() != stream
    device.wait(device.current_stream(), second)
    device.synchronize(second)
    assert device.is_over(second)
    assert began - 0.1 <= float(first) <= float(second) <= time.perf_counter() + 0.1
    work = DeviceStream(context.device).submit(partial(x.fill_, 0))  # type: ignore[arg-type]
    work.wait_on_device()
    assert not x.any()


@check(ONE, "functions of the device", {"kinds": CARD})
def _functions(context: Context) -> None:
    assert local_devices.num_local_accelerators() == torch.cuda.device_count()
    assert local_devices.local_device() == context.device
    assert local_devices.name_of(context.device) == torch.cuda.get_device_name(context.device)
    before = local_devices.allocated_bytes(context.device)
    held = torch.empty(BYTES, dtype=torch.uint8, device=context.device)
    assert local_devices.allocated_bytes(context.device) - before == BYTES
    assert local_devices.peak_memory_bytes(context.device) >= BYTES
    total = local_devices.total_memory_bytes(context.device)
    assert total is not None
    assert total > BYTES
    assert local_devices.num_allocation_failures(context.device) == 0
    states = devices.random_states(context.device)
    drawn = torch.rand(8, device=context.device)
    devices.set_random_states(context.device, states)
    assert torch.equal(drawn, torch.rand(8, device=context.device))
    devices.seed_generators(context.device, 3)
    drawn = torch.rand(8, device=context.device)
    devices.seed_generators(context.device, 3)
    assert torch.equal(drawn, torch.rand(8, device=context.device))
    storage = torch.UntypedStorage(BYTES, device=context.device)  # type: ignore[no-untyped-call]
    other = torch.UntypedStorage(0, device=context.device)  # type: ignore[no-untyped-call]
    if _private.can_swap_storages():
        _private.swap_storages(storage, other)
        assert (storage.nbytes(), other.nbytes()) == (0, BYTES)
    storage.resize_(0)
    del held


@check(ONE, "groups and operators of NCCL", {"kinds": CARD, "group": "none"})
def _nccl(context: Context) -> None:
    """As `tests.gpu.cards`, on one rank: constructors, timeouts, memory, operators, abort."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    timeout = timedelta(seconds=77)
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, timeout=timeout, device_id=context.device
    )
    parent = dist.group.WORLD
    assert parent is not None
    assert _private.group_timeout(parent) == timeout
    groups = {
        "of a bound job": _private.new_nccl_group([0], "a", timeout),
        "without kernels": _private.new_nccl_group([0], "b", timeout, without_kernels=True),
        "registered": _private.new_registered_group([0], "nccl", "c", timeout),
        "registered, without kernels": _private.new_registered_group(
            [0], "nccl", "d", timeout, without_kernels=True
        ),
        "of the engine": new_group(RankGroup((0,), 0, parent), "nccl", "e"),
    }
    for name, group in groups.items():
        numbers = torch.full((8,), 3.0, device=context.device)
        dist.all_reduce(numbers, group=group)
        dist.all_reduce(numbers, _private.scaled_sum(0.5), group=group)
        assert numbers.tolist() == [1.5] * 8, name
        dist.all_reduce(numbers, dist.ReduceOp.AVG, group=group)
        whole = torch.arange(8.0, device=context.device)
        dist.all_gather_into_tensor(whole, whole, group=group)
        dist.reduce_scatter_tensor(whole, whole, dist.ReduceOp.AVG, group=group)
        dist.all_to_all_single(numbers, whole, group=group)
        assert numbers.tolist() == [*map(float, range(8))], name
        assert _private.group_timeout(group) == timeout, name
    made = groups["of a bound job"]
    allocate = _private.tensor_allocator(made, context.device)
    context.report("allocates tensors", allocate is not None)
    if allocate is not None:
        tensor = allocate(BYTES)
        assert (tensor.numel(), tensor.dtype, tensor.device) == (BYTES, torch.uint8, context.device)
        dist.all_reduce(tensor, group=made)
    has_memory = _private.has_symmetric_memory(made, context.device)
    context.report("symmetric memory", has_memory)
    began = time.monotonic()
    for group in groups.values():
        group.abort()
    torch.cuda.synchronize()
    context.report("seconds of the aborts", time.monotonic() - began)


@check(ONE, "symmetric memory of NCCL", {"kinds": CARD, "group": "none"})
def _symmetric(context: Context) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=context.device)
    group = _private.new_nccl_group([0], "symmetric", timedelta(seconds=60), without_kernels=True)
    made = _private.symmetric_tensor(BYTES, group, context.device)
    made.fill_(3)
    dist.all_gather_into_tensor(made, made, group=group)
    assert bool((made == 3).all())


@check(ONE, "an aborted group and the next one", {"kinds": CARD, "group": "none"})
def _abort_from_a_thread(context: Context) -> None:
    """The heartbeat thread aborts; its current device is not this rank's."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    parent = dist.group.WORLD
    assert parent is not None
    for number in range(3):
        group = new_group(RankGroup((0,), 0, parent), "nccl", f"epoch {number}")
        numbers = torch.ones(8, device=context.device)
        dist.all_reduce(numbers, group=group)
        thread = threading.Thread(target=group.abort)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()
        assert numbers.tolist() == [1.0] * 8
