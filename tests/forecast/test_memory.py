"""Tests of the predicted memory of parameters and gradients, without activations."""

import torch
from torch import nn

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.precision import MixedPrecisionPolicy

UNIT = 4 * 16 * 16  # bytes of one layer


def step_memory(plan: Plan, *, accumulates: bool = False, on_cpu: bool = False) -> Certificate:
    loop = Configuration(accumulation=1 + accumulates, optimizer="sgd")
    return memory_certificate(plan, None, loop, on_cpu=on_cpu)


def plan_of(depth: int, *, world_size: int = 2, **options: object) -> Plan:
    """Plan layers of 1024 bytes, one per unit."""
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Sequential(Layer()) for _ in range(depth))
    return make_plan(model, units=nn.Sequential, world_size=world_size, **options)  # type: ignore[arg-type]


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)


def test_only_shards_of_parameters_remain_between_steps() -> None:
    for world_size in (1, 2, 4):
        memory = step_memory(plan_of(4, world_size=world_size))
        assert memory.between_steps_bytes == 4 * UNIT // world_size
        assert memory.gradient_bytes == 4 * UNIT // world_size


def test_the_peak_is_two_units_and_the_buffers_of_two_reductions() -> None:
    memory = step_memory(plan_of(5))
    assert memory.transient_bytes == 2 * UNIT + 2 * UNIT
    # At the last gather of backward, when the gradients of three units have been reduced.
    assert memory.peak.label == "gather layers.0"
    shards = 3 * UNIT // 2
    assert memory.peak_bytes == memory.between_steps_bytes + memory.transient_bytes + shards


def test_a_sum_in_another_dtype_is_cast_directly_to_the_gradients() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    plan = plan_of(1, precision=policy, world_size=1, strategy="ddp", replicas=2)
    memory = step_memory(plan)
    assert memory.peak.label == "reduce layers.0"
    # Parameters, the reduce buffer in bfloat16, and gradients.
    assert memory.peak_bytes == UNIT + UNIT // 2 + UNIT


def test_without_prefetch_one_unit_less_is_gathered() -> None:
    with_, without = (step_memory(plan_of(5, prefetch=prefetch)) for prefetch in (1, 0))
    assert with_.transient_bytes - without.transient_bytes == UNIT


def test_a_root_that_is_largest_peaks_while_its_gradients_wait() -> None:
    model = nn.Module()
    model.block = Layer()
    model.head = nn.Linear(16, 16 * 100, bias=False)
    memory = step_memory(make_plan(model, units=Layer, world_size=2))
    # The root and the block are gathered, with whole gradients of both. Before the root's gradient
    # shards are allocated, its parameters and its whole gradients are freed.
    assert memory.peak.label == "backward block"
    assert memory.transient_bytes == (2 * 100 + 2) * UNIT


def test_frozen_units_take_no_gradients() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(4))
    model.requires_grad_(requires_grad=False)
    memory = step_memory(make_plan(model, units=Layer, world_size=2))
    assert memory.between_steps_bytes == 4 * UNIT // 2
    assert memory.transient_bytes == 2 * UNIT


def test_a_cpu_keeps_reduce_buffers_as_gradients() -> None:
    plan = plan_of(5, world_size=1, strategy="ddp", replicas=4)
    memory = step_memory(plan, on_cpu=True)
    assert memory.between_steps_bytes == memory.gradient_bytes + 5 * UNIT == 2 * 5 * UNIT
    assert memory.peak_bytes == 2 * 5 * UNIT == step_memory(plan).peak_bytes
    kept, not_kept = (step_memory(plan_of(5), on_cpu=on_cpu) for on_cpu in (True, False))
    assert kept.timeline == not_kept.timeline, "shards are not kept"


def test_accumulation_needs_an_output_for_each_reduction() -> None:
    plan = plan_of(5)
    first, later = (step_memory(plan, accumulates=accumulates) for accumulates in (False, True))
    assert later.transient_bytes - first.transient_bytes == 2 * UNIT // 2
    # Gradient shards of the units that are not reduced yet are allocated as well.
    assert later.peak_bytes - first.peak_bytes == 2 * UNIT // 2 + 2 * UNIT // 2
