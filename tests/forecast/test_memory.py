"""What a rank holds, as the plan predicts it."""

import torch
from torch import nn

from shardwise.forecast.memory import step_memory
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.precision import MixedPrecisionPolicy

UNIT = 4 * 16 * 16  # bytes of one layer


def plan_of(depth: int, *, world_size: int = 2, head: bool = False, **options: object) -> Plan:
    """Layers of 1024 bytes, one a unit, and on request one of the root's own at the end."""
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Sequential(Layer()) for _ in range(depth))
    if head:
        model.head = Layer()
    return make_plan(model, units=nn.Sequential, world_size=world_size, **options)  # type: ignore[arg-type]


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)


def test_between_steps_there_are_shards_of_parameters_alone() -> None:
    for world_size in (1, 2, 4):
        memory = step_memory(plan_of(4, world_size=world_size))
        assert memory.between_steps_bytes == 4 * UNIT // world_size
        assert memory.gradient_bytes == 4 * UNIT // world_size


def test_gradients_of_earlier_backwards_are_there_between_steps() -> None:
    memory = step_memory(plan_of(4), accumulates=True)
    assert memory.between_steps_bytes == 2 * 4 * UNIT // 2


def test_the_peak_is_two_units_and_the_buffers_of_two_reductions() -> None:
    memory = step_memory(plan_of(5))
    assert memory.transient_bytes == 2 * UNIT + 2 * UNIT
    # When the last unit is gathered again, and those before the one that computes were reduced.
    assert memory.peak_event == "gather layers.0"
    shards = 3 * UNIT // 2
    assert memory.peak_bytes == memory.between_steps_bytes + memory.transient_bytes + shards


def test_a_sum_that_is_cast_goes_to_the_gradients_at_once() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    plan = plan_of(1, precision=policy, world_size=1, strategy="ddp", replicas=2)
    memory = step_memory(plan)
    assert memory.peak_event == "reduce layers.0"
    # Parameters; the buffer in bfloat16; gradients.
    assert memory.peak_bytes == UNIT + UNIT // 2 + UNIT


def test_without_prefetch_one_unit_less_is_gathered() -> None:
    with_, without = (step_memory(plan_of(5, prefetch=prefetch)) for prefetch in (1, 0))
    assert with_.transient_bytes - without.transient_bytes == UNIT


def test_the_gradients_of_the_root_wait() -> None:
    with_, without = (step_memory(plan_of(5, head=head)) for head in (True, False))
    assert with_.transient_bytes - without.transient_bytes == 2 * UNIT  # gathered, and waiting


def test_a_root_that_is_largest_peaks_while_its_gradients_wait() -> None:
    model = nn.Module()
    model.block = Layer()
    model.head = nn.Linear(16, 16 * 100, bias=False)
    memory = step_memory(make_plan(model, units=Layer, world_size=2))
    # It is whole, and so are its gradients, and the block. When it is reduced it has been freed,
    # and its gradients are gone from where they waited before it gets its own.
    assert memory.peak_event == "backward block"
    assert memory.transient_bytes == (2 * 100 + 2) * UNIT


def test_frozen_units_take_no_gradients() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(4))
    model.requires_grad_(requires_grad=False)
    memory = step_memory(make_plan(model, units=Layer, world_size=2))
    assert memory.between_steps_bytes == 4 * UNIT // 2
    assert memory.transient_bytes == 2 * UNIT


def test_whole_parameters_are_never_gathered() -> None:
    memory = step_memory(plan_of(5, world_size=1, strategy="ddp", replicas=4))
    assert memory.between_steps_bytes == 5 * UNIT
    assert memory.transient_bytes == 2 * UNIT
    # At the last one all gradients are there, and the buffers of the last two are among them.
    assert memory.peak_bytes == 2 * 5 * UNIT


def test_the_cpu_keeps_what_gradients_are_reduced_in() -> None:
    plan = plan_of(5, world_size=1, strategy="ddp", replicas=4)
    memory = step_memory(plan, on_cpu=True)
    assert memory.between_steps_bytes == memory.gradient_bytes + 5 * UNIT == 2 * 5 * UNIT
    assert memory.peak_bytes == 2 * 5 * UNIT, "as where they are not kept"
    assert step_memory(plan_of(5), on_cpu=True) == step_memory(plan_of(5)), "shards are not"


def test_accumulation_takes_a_target_for_each_reduction() -> None:
    plan = plan_of(5)
    first, later = (step_memory(plan, accumulates=accumulates) for accumulates in (False, True))
    assert later.transient_bytes - first.transient_bytes == 2 * UNIT // 2
    # Shards of gradients of the units still to come are there, too.
    assert later.peak_bytes - first.peak_bytes == 2 * UNIT // 2 + 2 * UNIT // 2
