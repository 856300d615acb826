"""The figures of `benchmarks.gpu`: time and memory of a step, and the work of the device."""

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "WARM_UP",
    "count_flops",
    "device_figures",
    "gigabytes",
    "milliseconds",
    "product_flops",
    "seconds_each",
    "step_figures",
    "summarize",
    "synchronize",
]

Figures = dict[str, float]  # as in the harness, which this must not import: it needs rich
WARM_UP = 3  # calls
PRODUCT = {"cuda": 8192, "cpu": 256}  # width of the matrices whose product measures the peak
PRODUCTS = 20
Span = tuple[float, float]  # begin and end
_COUNTED = ("allocator_calls", "device_allocations")
# NCCL's kernels, and its copies between devices by copy engines.
_COMMUNICATION = ("nccl", "Memcpy PtoP")
_COPIES = ("Memcpy", "Memset")
# Driver calls in which the host waits. Waits for the whole device do not count, because the
# profiler makes them, too.
_WAITS = ("StreamSynchronize", "EventSynchronize")


def seconds_each(action: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the mean seconds of ``action`` over several calls."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_figures(step: Callable[[], object], times: int, device: torch.device) -> Figures:
    """Return the mean seconds of a step and, on a GPU, peaks of memory and calls per step."""
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = _memory(device)
    dist.barrier()
    seconds = seconds_each(step, times, device)
    memory = {
        name: (value - before[name]) / times if name in _COUNTED else value
        for name, value in _memory(device).items()
    }
    return {"seconds": seconds, **memory}


def _memory(device: torch.device) -> Figures:
    """Return the current figures of torch's allocator."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "allocator_calls": stats["allocation.all.allocated"],
        "device_allocations": stats["segment.all.allocated"],
    }


def device_figures(step: Callable[[], object], device: torch.device) -> Figures:
    """Profile what the device runs in a step; on a CPU, return nothing."""
    if device.type != "cuda":
        return {}
    figures: Figures = {}
    for _ in range(2):  # the first run also loads the profiler
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            synchronize(device)
        figures = summarize(seen.events() or ())
    return figures


def summarize(events: Iterable[torch.autograd.profiler_util.FunctionEvent]) -> Figures:
    """Count kernels, host waits and seconds of communication in a profiler's events.

    Communication is *exposed* while no other kernel runs. A collective's kernel also waits for
    other ranks, so its seconds include more than the network's.
    """
    on_device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    communication: list[Span] = []
    compute: list[Span] = []
    kernels = waits = 0
    for event in events:
        if event.is_user_annotation:
            continue
        if event.device_type != on_device:
            waits += event.name.endswith(_WAITS)
            continue
        kernels += not event.name.startswith(_COPIES)
        spans = communication if event.name.startswith(_COMMUNICATION) else compute
        spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return {
        "kernel_launches": kernels,
        "host_waits": waits,
        "communication_seconds": total(communication),
        "exposed_seconds": total([*communication, *compute]) - total(compute),
    }


def total(spans: Iterable[Span]) -> float:
    """Return the length of the union of ``spans``."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def count_flops(step: Callable[[], object]) -> int:
    """Count FLOPs of all matrix products in a step; on a CPU, without fused attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    total: int = counter.get_total_flops()
    return total


def product_flops(device: torch.device) -> float:
    """Measure FLOP/s of the product of two bfloat16 matrices."""
    width = PRODUCT[device.type]
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    seconds_each(lambda: matrix @ matrix, WARM_UP, device)
    return 2 * width**3 / seconds_each(lambda: matrix @ matrix, PRODUCTS, device)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
