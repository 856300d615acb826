from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.time.step import StepTime, fused_bytes, step_time
from shardwise.forecast.work import Kind, Operation, Segment, Workload
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.plan import make_plan
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.schedule.events import EventKind

BLOCKS, WIDTH = 4, 8192
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def product(tokens: int) -> Operation:
    flops, shape = 2 * tokens * WIDTH * WIDTH, (1, tokens, WIDTH, WIDTH)
    return Operation("mm", Kind.MATMUL, flops, shape, 2, (), ())


def elementwise(read: int, write: int, size: int = 1 << 20) -> Operation:
    return Operation("add", Kind.MEMORY, 0, (), 2, ((read, size),), ((write, size),))


def workload_of(tokens: int, extra: tuple[Operation, ...] = (), kept: int = 0) -> Workload:
    """Each block has a product in forward and two in backward, and keeps ``kept`` bytes."""
    one = (product(tokens), *extra)
    forward = [
        Segment(EventKind.FORWARD, unit, one if unit else (), 0, kept, kept) for unit in _units()
    ]
    backward = [
        Segment(EventKind.BACKWARD, unit, one * 2 if unit else (), kept, kept, 0)
        for unit in [0, *reversed(_units()[1:])]
    ]
    names = ("", *(str(unit) for unit in range(BLOCKS)))
    return Workload(names, (*forward, *backward), len(forward), tokens)


def _units() -> range:
    return range(BLOCKS + 1)


def predict(
    configuration: Configuration,
    cluster: str = "8xA100",
    tokens: int = 8192,
    extra: tuple[Operation, ...] = (),
    kept: int = 0,
    offload: OffloadPolicy = NO_OFFLOAD,
    sent_bytes: int = 0,
) -> StepTime:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    plan = make_plan(
        model,
        world_size=configuration.shard_ranks,
        units=nn.Linear,
        strategy=configuration.strategy,
        replicas=configuration.replicas,
        precision=BF16,
        offload=offload,
    )
    machine = Machine.of(parse_cluster(cluster))
    workload = replace(workload_of(tokens, extra, kept), sent_bytes=sent_bytes)
    return step_time(plan, workload, machine, configuration)


LOCAL = Configuration(shard_size=8, sequence=8192)


def test_a_step_adds_up() -> None:
    step = predict(LOCAL)
    assert sum(step.breakdown.values()) == pytest.approx(step.seconds)
    assert step.tokens_per_second == pytest.approx(8192 / step.seconds)
    assert step.model_flops == 3 * BLOCKS * product(8192).flops
    assert step.hfu == step.mfu == pytest.approx(step.model_flops / step.seconds / 312e12)
    assert step.bound == "matmul"


def test_recomputation_counts_only_as_hardware_flops() -> None:
    again = replace(product(8192), is_recomputed=True)
    step = predict(LOCAL, extra=(again,))
    assert step.hardware_flops == 2 * step.model_flops


def test_scores_recomputed_by_attention_count_only_as_hardware_flops() -> None:
    flops, shape = 5 * (1 << 40), (1, 16, 8192, 8192, 128)
    attention = Operation(
        "scaled_dot_product_attention_backward", Kind.ATTENTION, flops, shape, 2, (), (), True
    )
    step, plain = predict(LOCAL, extra=(attention,)), predict(LOCAL)
    calls = 3 * BLOCKS
    assert step.model_flops - plain.model_flops == calls * 4 * (1 << 40)
    assert step.hardware_flops - plain.hardware_flops == calls * flops


def test_accumulation_repeats_micro_batches() -> None:
    seconds = [predict(replace(LOCAL, accumulation=number)).seconds for number in (1, 2, 3, 4, 64)]
    middle = seconds[3] - seconds[2]
    assert seconds[4] - seconds[3] == pytest.approx(60 * middle)
    assert middle < seconds[0]


def test_a_slow_network_is_exposed() -> None:
    far = replace(LOCAL, shard_size=64)
    fast, slow = predict(far, "64xA100:1600"), predict(far, "64xA100:100")
    assert slow.exposed_seconds > 5 * fast.exposed_seconds
    assert slow.bound == "exposed communication"
    near = replace(LOCAL, strategy="hsdp", replicas=8, accumulation=8)
    assert predict(near, "64xA100:1600").seconds < predict(near, "64xA100:100").seconds


def test_small_operations_are_bound_by_the_host_unless_compiled() -> None:
    many = tuple(elementwise(number, number + 1, size=1024) for number in range(200))
    eager = predict(LOCAL, tokens=16, extra=many)
    compiled = predict(replace(LOCAL, compiled=True), tokens=16, extra=many)
    assert eager.breakdown["host"] > 0.2 * eager.seconds
    assert compiled.seconds < 0.5 * eager.seconds


def test_a_pipeline_waits_for_its_first_and_last_micro_batches() -> None:
    few = predict(replace(LOCAL, pipeline=4, accumulation=4), "32xA100")
    many = predict(replace(LOCAL, pipeline=4, accumulation=64), "32xA100")
    assert few.breakdown["pipeline bubble"] / few.seconds == pytest.approx(3 / 7, rel=0.05)
    assert many.tokens_per_second > 1.5 * few.tokens_per_second


def test_chunks_shorten_the_bubble_and_send_more_often() -> None:
    one = replace(LOCAL, pipeline=4, accumulation=8)
    plain, chunked = (
        predict(replace(one, chunks=chunks), "32xA100", sent_bytes=1 << 24) for chunks in (1, 2)
    )
    sends = plain.breakdown["pipeline sends"]
    assert chunked.breakdown["pipeline sends"] == pytest.approx(2 * sends)
    assert sends > 8 * 2 * (1 << 24) / 300e9  # slower than the nominal rate of the links
    bubble = 3 / 8 / 2 * (chunked.seconds - chunked.breakdown["pipeline bubble"])
    assert chunked.breakdown["pipeline bubble"] == pytest.approx(bubble, rel=0.05)
    assert chunked.breakdown["pipeline bubble"] < 0.6 * plain.breakdown["pipeline bubble"]


def test_tensor_parallel_collectives_are_not_hidden() -> None:
    reduce = Operation("all_reduce", Kind.COLLECTIVE, 0, (), 2, ((1, 1 << 27),), (), axis="tensor")
    configuration = replace(LOCAL, shard_size=2, tensor=4)
    without = predict(configuration)
    step = predict(configuration, extra=(reduce,))
    assert step.seconds - without.seconds > 0.9 * step.breakdown["collective"]


def test_compiled_operations_keep_intermediate_results_in_registers() -> None:
    run = [elementwise(1, 2, 10), elementwise(2, 3, 10), elementwise(2, 4, 10)]
    reads = {1: 1, 2: 2, 3: 1}  # 3 is also read elsewhere; 4 is never read, as a gradient
    assert fused_bytes(run, reads) == 10 + 10 + 10
    assert fused_bytes(run[:1], reads) == 10 + 10


def test_offloaded_activations_are_copied_while_compute_goes_on() -> None:
    configuration = replace(LOCAL, activation_offload=True)
    assert predict(configuration, kept=1 << 20).seconds == pytest.approx(predict(LOCAL).seconds)
    kept = 1 << 30
    bound = predict(configuration, kept=kept).seconds
    assert bound > 2 * BLOCKS * kept / 31e9  # the rate of PCIe, in both directions


def test_offloaded_shards_are_copied() -> None:
    offloaded = predict(LOCAL, offload=CPUOffloadPolicy())
    assert offloaded.seconds > predict(LOCAL).seconds
