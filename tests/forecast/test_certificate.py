"""Tests of the memory certificate with handmade activations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import profile

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory import step
from shardwise.forecast.memory.step import CATEGORIES, Certificate, memory_certificate
from shardwise.forecast.memory.update import update_bytes
from shardwise.forecast.planned import plan_of
from shardwise.forecast.work import Kind, Operation, Segment, Workload
from shardwise.plan.wire import Wire
from shardwise.schedule.events import EventKind
from tests.forecast.peaks import peak_of

BLOCK = 16 * 16  # elements of one block
UNIT = 4 * BLOCK  # its bytes
KEPT = 1000  # bytes that a block's forward leaves for its backward
CONFIGURATION = Configuration(
    shard_size=4, sequence=8, compute_dtype=torch.float32, optimizer="adamw"
)


def model_of(depth: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(depth))
    return model


def workload_of(depth: int) -> Workload:
    """Each forward peaks at 1500 bytes and keeps 1000, which its backward frees."""
    forward = [
        Segment(EventKind.FORWARD, 0, (), 0, 0, 0),
        *(
            Segment(
                EventKind.FORWARD, 1 + n, (), KEPT * n, KEPT * n + 3 * KEPT // 2, KEPT * (n + 1)
            )
            for n in range(depth)
        ),
    ]
    end = KEPT * depth
    backward = [
        Segment(EventKind.BACKWARD, 0, (), end, end, end),
        *(
            Segment(EventKind.BACKWARD, 1 + n, (), KEPT * (n + 1), KEPT * (n + 2), KEPT * n)
            for n in reversed(range(depth))
        ),
    ]
    units = ("", *(f"layers.{n}" for n in range(depth)))
    return Workload(units, (*forward, *backward), len(forward), tokens=8)


def without_activations(depth: int) -> Workload:
    bare = (
        replace(one, start_bytes=0, peak_bytes=0, end_bytes=0)
        for one in workload_of(depth).segments
    )
    return replace(workload_of(depth), segments=tuple(bare), tokens=0)


def certificate_of(configuration: Configuration, depth: int = 5, stage: int = 0) -> Certificate:
    plan = plan_of(model_of(depth), configuration)
    return memory_certificate(plan, workload_of(depth), configuration, stage=stage)


def test_every_category_is_in_the_peak() -> None:
    certificate = certificate_of(CONFIGURATION, depth=5)
    shards = 4 * BLOCK * 5 // 4
    peak = certificate.peak
    assert peak.label == "backward layers.3"
    assert (peak.parameters, peak.optimizer) == (shards, 2 * shards)
    assert peak.gathered == 2 * 4 * BLOCK, "the unit that computes and the next one"
    assert peak.communication == 2 * 4 * BLOCK, "its gradients, and those that are being reduced"
    assert peak.gradients == 4 * BLOCK // 4, "the output of that reduction"
    assert peak.activations == 5 * KEPT
    assert peak.buffers == 2 * 8 * 8, "tokens and labels"
    assert peak.total == certificate.peak_bytes == sum(peak.by_category().values())


def test_a_wire_takes_memory_to_encode_and_decode() -> None:
    """Four shards of 64 elements in blocks of 16, while one unit is gathered and one is reduced."""
    plan = plan_of(model_of(5), CONFIGURATION)
    wire = Wire(gather="int8", reduce="int4", block=16)
    units = (replace(one, options=replace(one.options, wire=wire)) for one in plan.units)
    plan = replace(plan, units=tuple(units))
    peak = memory_certificate(plan, workload_of(5), CONFIGURATION).peak
    gather = 4 * (64 + 4 * 4) + 8 * 4 * 64  # codes, and two buffers with their numbers
    sent_and_received = 2 * 4 * (64 // 2 + 4 * 4)
    reduction = sent_and_received + (4 + 4 + 1) * 4 * 64  # scaled, rounded, and as bytes
    assert peak.label == "backward layers.3"
    assert peak.communication == 2 * 4 * BLOCK + gather + reduction


def test_without_activations_the_peak_is_that_of_the_plan() -> None:
    plan = plan_of(model_of(5), CONFIGURATION)
    configuration = replace(CONFIGURATION, optimizer="sgd")
    certificate = memory_certificate(plan, without_activations(5), configuration)
    assert certificate.peak_bytes == memory_certificate(plan, None, configuration).peak_bytes


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_element"),
    [("adamw", 8), ("lion", 4), ("sgd", 0), ("sgd_momentum", 4), ("adam8bit", 2 * (1 + 4 / 16))],
)
def test_states_of_the_optimizer(optimizer: str, bytes_per_element: float) -> None:
    options: dict[str, Any] = {"optimizer": optimizer}
    if optimizer == "adam8bit":  # each row of 16 elements has a scale
        options["optimizer_options"] = (("min_elements", 0),)
    certificate = certificate_of(replace(CONFIGURATION, **options))
    assert certificate.peak.optimizer == pytest.approx(bytes_per_element * BLOCK * 5 / 4)


def test_adafactor_keeps_a_mean_of_each_row_and_column() -> None:
    certificate = certificate_of(replace(CONFIGURATION, optimizer="adafactor"))
    assert certificate.peak.optimizer == 5 * 4 * (16 // 4 + 16)


def test_a_foreach_update_allocates_roots_of_all_second_moments() -> None:
    certificate = certificate_of(replace(CONFIGURATION, optimizer_loop="foreach"))
    assert certificate.timeline[-1].label == "update"
    assert certificate.timeline[-1].temporaries == 4 * BLOCK * 5 // 4
    assert certificate_of(CONFIGURATION).timeline[-1].temporaries == 0


UPDATES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "nadam": partial(torch.optim.NAdam, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, foreach=True),
    "adam8bit": sw.optim.Adam8bit,
    "muon": sw.optim.Muon,
    "soap": partial(sw.optim.SOAP, precondition_frequency=1),
}


@pytest.mark.parametrize("name", UPDATES)
def test_temporaries_are_those_of_the_optimizer(name: str) -> None:
    options: dict[str, Any] = {"optimizer": name, "optimizer_loop": "foreach"}
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(256, 256) for _ in range(3))})
    parameters = list(model.parameters())
    matrices = [one for one in parameters if name not in ("muon", "soap") or one.ndim > 1]
    optimizer = UPDATES[name](matrices)
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.step()
    with profile(profile_memory=True) as profiled:
        optimizer.step()
    configuration = replace(CONFIGURATION, shard_size=1, **options)
    plan = plan_of(model.to("meta"), configuration)
    found = update_bytes(plan, configuration, on_cpu=True)
    assert found == pytest.approx(peak_of(profiled), rel=0.05)


def test_offload_moves_shards_and_states_to_the_host() -> None:
    certificate = certificate_of(replace(CONFIGURATION, offload="parameters"))
    assert certificate.peak.parameters == certificate.peak.optimizer == 0
    assert certificate.host_bytes == 4 * 4 * BLOCK * 5 // 4, "gradients too"


def test_activation_offload_leaves_activations_of_one_block() -> None:
    certificate = certificate_of(replace(CONFIGURATION, activation_offload=True))
    assert max(moment.activations for moment in certificate.timeline) == 2 * KEPT
    assert certificate.host_bytes == 5 * KEPT


def test_a_stage_keeps_one_micro_batch_per_later_stage() -> None:
    configuration = replace(CONFIGURATION, pipeline=4, accumulation=8)
    for stage in range(4):
        peak = certificate_of(configuration, stage=stage).peak
        assert peak.activations >= 5 * KEPT * (4 - stage)
        assert peak.activations <= 5 * KEPT * (4 - stage) + KEPT


def test_chunks_keep_more_micro_batches() -> None:
    """The first stage keeps (p - 1) / (p * chunks) more micro-batches (arXiv 2205.05198)."""
    for chunks in (2, 4):
        configuration = replace(CONFIGURATION, pipeline=4, accumulation=8, chunks=chunks)
        kept = 5 * KEPT * 4 * (1 + 3 / (4 * chunks))
        assert kept <= certificate_of(configuration).peak.activations <= kept + KEPT
    with pytest.raises(PlanError, match="accumulation to be a multiple of pipeline=4, got 6"):
        certificate_of(replace(configuration, accumulation=6))


def test_gathers_and_reductions_reserve_separate_memory() -> None:
    certificate = certificate_of(CONFIGURATION)
    assert certificate.device_bytes > certificate.reserved_bytes > certificate.peak_bytes


def test_optimizer_states_take_the_blocks_of_activations_in_which_they_fit() -> None:
    """Shards have 256 bytes: a quarter of the written bytes are in blocks that can take one."""
    writes = ((0, 256), *((number, 128) for number in range(1, 7)))
    operation = Operation("mm", Kind.MATMUL, 0, (), 4, (), writes)
    plan, workload = plan_of(model_of(5), CONFIGURATION), workload_of(5)
    first, *others = workload.segments
    written = replace(workload, segments=(replace(first, operations=(operation,)), *others))
    for optimizer, split in (("adamw", 6 * KEPT // 4), ("sgd", 0)):
        configuration = replace(CONFIGURATION, optimizer=optimizer)
        found = memory_certificate(plan, written, configuration).reserved_bytes
        assert found - memory_certificate(plan, workload, configuration).reserved_bytes == split


def test_fsdp1_keeps_the_blocks_in_which_it_sharded_the_largest_unit() -> None:
    small = replace(CONFIGURATION, optimizer="sgd", stack="fsdp1")
    plan = plan_of(model_of(2), small)
    reserved = memory_certificate(plan, without_activations(2), small).reserved_bytes
    streams = 2 * UNIT + 2 * UNIT  # of two gathers and two reductions
    assert reserved == plan.shard_bytes + 3 * UNIT + streams
    deep = certificate_of(small, 50).reserved_bytes
    with mock.patch.object(step, "_loaded_bytes", return_value=0):
        assert certificate_of(small, 50).reserved_bytes == deep, "activations use the blocks"


def test_thousands_of_ranks_take_no_longer() -> None:
    certificate = certificate_of(replace(CONFIGURATION, strategy="hsdp", replicas=1 << 12))
    assert certificate.peak_bytes == certificate_of(CONFIGURATION).peak_bytes
    assert set(certificate.peak.by_category()) == set(CATEGORIES)


# -- parameters and gradients alone, which tests/runtime/test_step_memory.py measures --------------


def step_memory(depth: int, *, on_cpu: bool = False, **options: Any) -> Certificate:
    plan = plan_of(model_of(depth), replace(CONFIGURATION, **{"shard_size": 2} | options))
    return memory_certificate(plan, None, Configuration(optimizer="sgd"), on_cpu=on_cpu)


def test_the_peak_is_two_units_and_the_buffers_of_two_reductions() -> None:
    memory = step_memory(5)
    assert memory.transient_bytes == 2 * UNIT + 2 * UNIT
    # At the last gather of backward, when the gradients of three units have been reduced.
    assert memory.peak.label == "gather layers.0"
    shards = 3 * UNIT // 2
    assert memory.peak_bytes == memory.between_steps_bytes + memory.transient_bytes + shards


def test_a_sum_in_another_dtype_is_cast_directly_to_the_gradients() -> None:
    memory = step_memory(2, strategy="ddp", replicas=2, reduce_dtype=torch.bfloat16)
    assert memory.peak.label == "reduce layers.0"
    # Parameters, the reduce buffers in bfloat16, and gradients.
    assert memory.peak_bytes == 2 * UNIT + 2 * UNIT // 2 + 2 * UNIT


def test_a_root_that_is_largest_peaks_while_its_gradients_wait() -> None:
    model = model_of(2)
    model.head = nn.Linear(16, 16 * 100, bias=False)
    plan = plan_of(model, replace(CONFIGURATION, shard_size=2))
    memory = memory_certificate(plan, None, Configuration(optimizer="sgd"))
    # The root and a block are gathered, with whole gradients of both and of the block before.
    assert memory.peak.label == "backward layers.0"
    assert memory.transient_bytes == (2 * 100 + 3) * UNIT


def test_a_cpu_keeps_reduce_buffers_as_gradients() -> None:
    kept, freed = (
        step_memory(5, strategy="ddp", replicas=4, on_cpu=on_cpu) for on_cpu in (True, False)
    )
    assert kept.between_steps_bytes == kept.gradient_bytes + 5 * UNIT == 2 * 5 * UNIT
    assert kept.peak_bytes == freed.peak_bytes == 2 * 5 * UNIT
    assert step_memory(5, on_cpu=True).timeline == step_memory(5).timeline, "shards are not kept"
