"""Compares the planned scratch memory of quantized wires with PyTorch's allocations."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import profile

import shardwise as sw
from shardwise.blockwise import Blocks
from shardwise.comm.api import CollectiveId, Step, Work
from shardwise.comm.device import ThreadStream
from shardwise.features.host_collectives import HostCollectives
from shardwise.forecast.memory.buffers import MemoryReplay, ReplayOptions
from shardwise.forecast.time.replay import schedule
from shardwise.forecast.time.wires import gather_scratch, reduce_scratch
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind
from tests.checkpoint.training import options_for
from tests.forecast.peaks import peak_of
from tests.ranks import on_ranks

TOLERANCE = 0.05
WIDTH = 300


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [
        (3, 99_999, torch.bfloat16),  # in several steps
        pytest.param(1, 60_000, torch.float32, marks=pytest.mark.thorough),
        pytest.param(4, 10_001, torch.float32, marks=pytest.mark.thorough),
    ],
)
def test_encoding_and_decoding_allocate_what_is_planned(
    name: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    blocks, numbers = Blocks(name, 64), torch.randn(rows, size, dtype=torch.float32).to(dtype)
    encoded = torch.empty(rows, blocks.num_bytes(size), dtype=torch.uint8)
    for to_numbers in (False, True):
        with profile(profile_memory=True) as profiled:
            if to_numbers:
                blocks.decode(encoded, numbers)
            else:
                blocks.encode(numbers, encoded)
        planned = blocks.scratch_bytes(
            rows, size, to_numbers=to_numbers, itemsize=dtype.itemsize, on_cpu=True
        )
        assert peak_of(profiled) == pytest.approx(planned, rel=TOLERANCE)


def run_at_once(_: ThreadStream, job: Callable[[], None], collective: CollectiveId | None) -> Work:
    """Run ``job`` on the calling thread, the only one that the profiler records."""
    work = Work(collective, job)
    work.run()
    return work


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "wire"),
    [
        ("hsdp", sw.Wire("int8", "int4")),
        ("ddp", sw.Wire(None, "int8", ranks_per_host=2, error_feedback=True)),
        pytest.param("fsdp", sw.Wire("fp8", "int4"), marks=pytest.mark.thorough),
        pytest.param("fsdp", sw.Wire(None, "int8", ranks_per_host=2), marks=pytest.mark.thorough),
        pytest.param("hfsdp", sw.Wire("int4", "fp8"), marks=pytest.mark.thorough),
    ],
)
def test_collectives_allocate_what_is_planned(strategy: str, wire: sw.Wire) -> None:
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = sw.fully_shard(
        nn.Sequential(*blocks), units=nn.Linear, wire=wire, **options_for(strategy)
    )
    relay, peaks = HostCollectives.relay, dict[str, int]()

    def measured(queue: HostCollectives, steps: Sequence[Step], label: str) -> Work:
        with profile(profile_memory=True) as profiled:
            work = relay(queue, steps, label)
            del steps
        peaks[label] = peak_of(profiled)
        return work

    with (
        mock.patch.object(ThreadStream, "submit", run_at_once),
        mock.patch.object(HostCollectives, "relay", measured),
    ):
        for _ in range(2):
            model(torch.randn(4, WIDTH)).sum().backward()
    plan = runtime_of_root(model).plan
    assert peaks
    for unit in plan.units:
        ranks = plan.replicas if unit.two_level_gather else plan.world_size
        planned = {
            f"gather {unit.label}": gather_scratch(unit, ranks, on_cpu=True),
            f"keep {unit.label}": gather_scratch(unit, ranks, on_cpu=True),
            f"reduce {unit.label}": reduce_scratch(plan, unit, on_cpu=True),
        }
        for label, num_bytes in planned.items():
            if label in peaks:
                assert peaks[label] == pytest.approx(num_bytes, rel=TOLERANCE), label
    replay, most = MemoryReplay(plan, ReplayOptions(on_cpu=True)), 0
    for event in schedule(plan):
        replay.apply(event)
        most = max(most, replay.encoding)
        if event.kind is EventKind.REDUCE and wire.reduce:
            assert replay.encoding >= reduce_scratch(plan, plan.units[event.unit], on_cpu=True)
    assert most >= max(peaks.values()) * (1 - TOLERANCE)
    replay.check_end()
    assert replay.encoding == 0
