"""The optimizer's step on the device, with shards and states in host memory."""

import gc
import os
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.features import host_step
from shardwise.features.device_step import DeviceSteps, _local
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.buffers import DeviceStepReplay
from shardwise.forecast.memory.step import memory_certificate
from shardwise.forecast.states import stepped_bytes
from shardwise.plan.plan import Plan
from shardwise.runtime.ledger import Record
from shardwise.schedule.events import Event, EventKind
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.runtime.one_process import runtime_of
from tests.streams.checker import check_ranks
from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import DEVICE, Program, digest_of_training, train
from tests.streams.seeds import patched
from tests.streams.simulation import Problem, Simulation

PROGRAMS = {
    "fsdp": Program(offload="device", steps=3),
    "in backward": Program("stack", offload="device", steps=3, steps_in_backward=True),
    "in backward, units are kept": Program(
        offload="device",
        steps=3,
        steps_in_backward=True,
        options={"reshard_after_forward": False},
    ),
    "clipped, accumulated": Program("gpt", offload="device", clip=0.5, accumulate=2),
    "hsdp": Program(strategy="hsdp", offload="device", steps=3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_race_and_the_host_never_waits(name: str) -> None:
    program = PROGRAMS[name]
    for verdict in check_ranks(program, 4, of=(0, 3)):
        assert not verdict.found, "\n".join(map(str, verdict.found[:5]))


ON_HOST = Program("stack", offload="all", steps=3, steps_in_backward=True)


def test_steps_on_the_host_in_backward_have_no_race() -> None:
    """The host waits for the gradients of the unit that it steps, and for nothing else."""
    for verdict in check_ranks(ON_HOST, 4, of=(0, 3)):
        races = [str(one) for one in verdict.found if one.problem is not Problem.SYNC]
        assert not races, "\n".join(races[:5])
        assert all("finish_offload" in one.text for one in verdict.found)


class WholeMatrices(torch.optim.RMSprop):
    """An optimizer that cannot be stepped on the device."""

    steps_units = False


@on_ranks(2)
@pytest.mark.parametrize(
    ("offload", "kind", "fused", "threads", "used", "warned"),
    [
        ("all", torch.optim.AdamW, True, 1, [8, 1, 8, 1], []),
        ("all", torch.optim.AdamW, False, 1, [], [r"fused=True\)"]),
        ("all", torch.optim.AdamW, True, 2, [], []),
        ("all", torch.optim.SGD, True, 1, [], [r"set_num_threads\(8\)"]),
        ("all", torch.optim.SGD, False, 2, [], [r"fused=True\)"]),
        ("all", torch.optim.RMSprop, None, 1, [], [r"set_num_threads\(8\)"]),
        ("all", torch.optim.RMSprop, None, 2, [], []),
        ("all", WholeMatrices, None, 1, [], [r"set_num_threads\(8\)"]),
        ("device", torch.optim.AdamW, False, 1, [], []),
        (None, torch.optim.AdamW, False, 1, [], []),
    ],
)
def test_steps_on_the_host_use_all_cores_or_say_why_not(
    offload: str | None,
    kind: Any,
    fused: bool | None,
    threads: int,
    used: list[int],
    warned: list[str],
) -> None:
    program, simulation = Program(offload=offload), Simulation()
    now = [threads]
    with (
        simulated(simulation),
        mock.patch.object(host_step, "_cores_of_rank", return_value=8),
        mock.patch.object(torch, "get_num_threads", side_effect=lambda: now[-1]),
        mock.patch.object(torch, "set_num_threads", now.append),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        model = build(program.name).to(DEVICE)
        program.shard(model)
        optimizer = kind(model.parameters())
        if fused is not None:
            optimizer.param_groups[0]["fused"] = fused
        for parameter in model.parameters():  # a step without gradients
            parameter.requires_grad_(False)
        for _ in range(2):
            optimizer.step()
    assert now[1:] == used
    found = [str(one.message) for one in seen if "host memory slowly" in str(one.message)]
    assert len(found) == bool(warned)
    for part in (r"fused=True\)", r"set_num_threads\(8\)"):
        assert any(re.search(part, text) for text in found) == (part in warned)
    for text in found:
        assert ("CPUOffloadPolicy(step='device')" in text) == (kind is not WholeMatrices)


@on_ranks(2)
def test_only_the_step_on_the_host_uses_all_cores() -> None:
    """Not a closure, nor forward and backward after a step that has raised an error."""
    program, simulation = Program(offload="all"), Simulation()
    now, seen = [1], list[int]()

    def closure() -> float:
        seen.append(now[-1])
        return 0.0

    def fail(*_: object) -> None:
        seen.append(now[-1])
        raise ValueError("it hurts")

    with (
        simulated(simulation),
        mock.patch.object(host_step, "_cores_of_rank", return_value=8),
        mock.patch.object(torch, "get_num_threads", side_effect=lambda: now[-1]),
        mock.patch.object(torch, "set_num_threads", now.append),
    ):
        model = build(program.name).to(DEVICE)
        program.shard(model)
        model.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        optimizer.step(closure)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            handle = register(fail)
            with pytest.raises(ValueError, match="it hurts"):
                optimizer.step()
            assert now[-1] == 1
            handle.remove()
        with (
            mock.patch.object(optimizer, "_init_group", side_effect=ValueError("it hurts")),
            pytest.raises(ValueError, match="it hurts"),
        ):
            optimizer.step()
        optimizer.step()
        assert now[-1] == 1, "after a step that has raised an error"
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", host_step.ANY_THREADS)
def test_these_fused_steps_have_the_same_bits_with_any_number_of_threads(
    kind: Any, dtype: torch.dtype
) -> None:
    before, values = torch.get_num_threads(), []
    torch.manual_seed(0)
    whole, gradient = torch.randn(2, 200_003)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            parameter = nn.Parameter(whole.to(dtype))
            optimizer = kind([parameter], fused=True)
            for _ in range(2):
                parameter.grad = gradient.to(dtype)
                optimizer.step()
            values.append(parameter.detach())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, values[0]) for one in values)


def test_the_cores_of_a_machine_are_divided_among_its_ranks() -> None:
    with (
        mock.patch.object(os, "sched_getaffinity", return_value=range(64), create=True),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8"}),
    ):
        assert host_step._cores_of_rank() == 8


@on_ranks(2)
def test_gradients_arrive_on_the_host_while_another_unit_is_stepped() -> None:
    bits = digest_of_training(ON_HOST, is_late=True)
    assert bits == digest_of_training(replace(ON_HOST, offload=None), is_late=True)
    simulation = Simulation()
    with simulated(simulation):
        model = train(ON_HOST, simulation, build(ON_HOST.name))
    names, labels = sw.ledger(model).names(), [f"layers.{i}" for i in (2, 1, 0)]
    for first, second in pairwise(labels):
        began = names.index(f"finish_reduce {second}")
        stepped = names.index(f"step {first}")
        assert names.index(f"finish_reduce {first}") < began < stepped
        assert stepped < names.index(f"step {second}")
    assert names.index("reduce Stack") < names.index("step layers.1")


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"),
    covered_first(
        [(name, 4 if name == "hsdp" else 2) for name in PROGRAMS],
        leave=("fsdp", "in backward, units are kept"),
    ),
)
def test_late_streams_change_no_bit(name: str) -> None:
    program = PROGRAMS[name]
    plain = replace(program, offload=None)
    assert digest_of_training(program, is_late=True) == digest_of_training(plain, is_late=True)


@on_ranks(4)
@pytest.mark.parametrize("in_backward", [False, True])
def test_copies_overlap_and_take_the_foreseen_memory(in_backward: bool) -> None:
    program = Program("stack", offload="device", steps=3, steps_in_backward=in_backward)
    simulation = Simulation()
    sampled: list[int] = []
    copied: weakref.WeakSet[Any] = weakref.WeakSet()

    def sample(original: Callable[..., Any]) -> Callable[..., Any]:
        def sampled_copy(steps: DeviceSteps, *args: Any) -> Any:
            made = original(steps, *args)
            copied.add(made)
            with _disable_current_modes():
                sampled.append(sum(map(_device_bytes, copied)))
            return made

        return sampled_copy

    with simulated(simulation), patched(DeviceSteps, "_copy_to_device", sample):
        model = train(program, simulation, build(program.name))
        gc.collect()
        assert not copied, "the units are off the device after the step"
    plan = runtime_of(model).plan
    configuration = Configuration(step_in_backward=in_backward)
    sizes = [stepped_bytes(unit, configuration) for unit in plan.units]
    ledger = sw.ledger(model)
    _check_peak(max(sampled), plan, configuration, ledger.events())
    records = [r for r in ledger.records() if r.event.kind in _COPIES]
    for kind in _COPIES:
        found = {r.event.unit: r.event.bytes for r in records if r.event.kind is kind}
        assert found.keys() == {0, 1, 2, 3}
        for index, num_bytes in found.items():  # the last ranks have padding, without states
            assert (
                num_bytes == sizes[index]
                if dist.get_rank() == 0
                else plan.units[index].shard_bytes <= num_bytes <= sizes[index]
            )
    if in_backward:  # the root is reduced last, when all other units were stepped
        records = [r for r in records if r.event.unit]
    _check_overlap(records, simulation.current_stream(DEVICE).number)
    if in_backward:
        names = ledger.names()
        for earlier, later in ((3, 2), (2, 1)):
            name = plan.units[earlier].label
            begun = names.index(f"states_to_device {name}")
            assert begun < names.index(f"finish_reduce {name}") < names.index(f"step {name}")
            assert begun < names.index(f"backward {plan.units[later].label}")


_COPIES = (EventKind.STATES_TO_DEVICE, EventKind.STATES_TO_HOST)


def _device_bytes(unit: Any) -> int:
    tensors = [on_device for _, on_device in unit.shards]
    for state in unit.states.values():
        tensors += [_local(value) for value in state.values() if value.ndim]
    return sum(one.nbytes for one in tensors)


def _check_peak(
    measured: int, plan: Plan, configuration: Configuration, events: Sequence[Event]
) -> None:
    replay = DeviceStepReplay(plan, configuration)
    peak = replay.update_bytes
    for event in events:
        replay.apply(event)
        peak = max(peak, replay.allocated)
    assert measured == peak if dist.get_rank() == 0 else measured <= peak
    certificate = memory_certificate(plan, None, configuration)
    assert max(m.optimizer for m in certificate.timeline) == peak


def _check_overlap(records: Sequence[Record], compute: int) -> None:
    """Copies of neighboring units wait neither for each other nor for each other's step."""
    ends: dict[tuple[EventKind, int], Any] = {
        (one.event.kind, one.event.unit): one.works[0].times[1] for one in records
    }
    order = [one.event.unit for one in records if one.event.kind is _COPIES[1]]
    for first, second, third in zip(order, order[1:], order[2:], strict=False):
        arrival = ends[_COPIES[0], third].event.clock
        leaving = ends[_COPIES[1], first].event
        stepped = ends[_COPIES[1], second].event
        assert arrival.get(leaving.stream.number, 0) < leaving.clock[leaving.stream.number]
        assert arrival[compute] < stepped.clock[compute]
