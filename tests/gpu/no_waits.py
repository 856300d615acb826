"""Steady steps: the host waits for nothing, and asks the driver for no memory."""

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_figures import summarize
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from tests.gpu import staged
from tests.gpu.registry import Context, check
from tests.gpu.training import WIDE, WideStack

NO_WAITS = "no waits"
WARM_UP, STEADY = 3, 3  # steps
ROWS = 64


def bf16() -> sw.MixedPrecisionPolicy:
    return sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


PROGRAMS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2, two micro-batches": {"strategy": "zero2", "accumulate": 2},
    "fsdp": {},
    "fsdp, bfloat16": {"mp_policy": bf16()},
    "fsdp, granularity dim": {"granularity": "dim"},
    "fsdp, clipped": {"clip": 0.1},
    "fsdp, optimizer in backward": {"in_backward": True},
    "fsdp, offload of activations": {"offloads": True},
    "fsdp, wires": {"wire": sw.Wire("int8", "int8")},
    "hsdp": {"strategy": "hsdp"},
    "hfsdp": {"strategy": "hfsdp"},
}


class Program:
    """A model and its step."""

    def __init__(
        self,
        context: Context,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        in_backward: bool = False,
        offloads: bool = False,
        **options: Any,
    ) -> None:
        self.context, self._accumulate, self._clip = context, accumulate, clip
        torch.manual_seed(0)
        self.model: Any = WideStack(depth=4).to(context.device)
        self._batch = torch.randn(ROWS, WIDE).to(context.device)
        if options.get("strategy") in {"hsdp", "hfsdp"}:
            ranks = torch.arange(dist.get_world_size()).view(2, -1)
            names = ("replicate", "shard")
            kind = context.device.type
            options["mesh"] = DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False)
        sw.fully_shard(self.model, units="auto", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._in_backward = in_backward
        if in_backward:
            sw.optimizer_in_backward(self.model, self.optimizer)
        self._offloads = offloads

    def step(self) -> None:
        for _ in range(self._accumulate):
            with sw.offload_activations(self.model) if self._offloads else nullcontext():
                loss: Tensor = self.model(self._batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        if self._clip is not None:
            sw.clip_grad_norm_(self.model.parameters(), self._clip)
        if not self._in_backward:
            self.optimizer.step()
            self.optimizer.zero_grad()


def assert_does_not_wait(context: Context, program: Program) -> None:
    for _ in range(WARM_UP):
        program.step()
    if context.kind != "cuda":
        with context.steady():
            program.step()
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with context.steady():
        for _ in range(STEADY):
            program.step()
    after = torch.cuda.memory_stats()
    events: list[Any] = []
    for _ in range(2):  # the first run also loads the profiler
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            program.step()
            torch.cuda.synchronize()
        events = list(seen.events() or ())
    figures = summarize(events)
    calls = ("allocation.all.allocated", "segment.all.allocated")
    allocations, segments = ((after[name] - before[name]) / STEADY for name in calls)
    figures["allocator_calls"], figures["device_allocations"] = allocations, segments
    figures["record_stream"] = sum("record_stream" in event.name for event in events)
    for name, value in figures.items():
        context.report(name, value)
    assert figures["kernel_launches"], "the profiler has recorded nothing"
    for name in ("host_waits", "device_allocations", "record_stream"):
        assert figures[name] == 0, f"{name}: {figures[name]}"


for name, values in PROGRAMS.items():

    @check(NO_WAITS, name, {"group": "fake", "seconds": 30.0}, {"values": values})
    def _steady(context: Context, values: dict[str, Any]) -> None:
        assert_does_not_wait(context, Program(context, **values))


@check(NO_WAITS, "fsdp, recorded", {"group": "fake", "modules": ("pydantic",), "kinds": ("cuda",)})
def _recorded(context: Context) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(context)
        with sw.record(program.model, folder, optimizer=program.optimizer):
            assert_does_not_wait(context, program)


@check(NO_WAITS, "fsdp, 2 real ranks", {"group": "staged", "ranks": 2, "kinds": ("cuda",)})
def _two_ranks(context: Context) -> None:
    context.report("streams wait for flags", staged.flags_work())
    program = Program(context)
    if staged.flags_work():  # otherwise the backend waits itself
        assert_does_not_wait(context, program)
