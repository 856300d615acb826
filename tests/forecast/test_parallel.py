"""Tests of model parallelism: one rank's share of the work, and its collectives."""

from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models.model import Model, workload_of
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.view.planning import Planned
from shardwise.forecast.work import Kind, Operation

BATCH, TIME, HIDDEN, BLOCKS = 2, 32, 32, 4
LLAMA = Shape(arch="llama", layers=BLOCKS, hidden=HIDDEN, heads=4, kv_heads=2, vocab=48, ffn=64)
EXPERTS = replace(LLAMA, experts=4)
ONE = Configuration(sequence=TIME, micro_batch=BATCH, shard_size=4)


@cache
def operations(shape: Shape, stage: int = 0, **degrees: Any) -> list[Operation]:
    return list(workload_of(Model("", shape), replace(ONE, **degrees), stage).operations)


def flops(found: list[Operation]) -> int:
    return sum(one.flops for one in found)


def collectives(found: list[Operation]) -> Counter[tuple[str, str]]:
    return Counter((one.axis, one.name) for one in found if one.kind is Kind.COLLECTIVE)


def parameters(shape: Shape, stage: int = 0, **degrees: Any) -> int:
    module = Model("", shape).build(replace(ONE, **degrees), stage)
    return sum(one.numel() for one in module.parameters())


def test_tensor_parallelism_divides_work_and_gathers_sequences() -> None:
    found = operations(LLAMA, tensor=2)
    assert flops(found) == flops(operations(LLAMA)) // 2
    # Gathers before attention, MLP and head, and reductions after them; in backward, the reverse.
    times = 2 * BLOCKS + 1
    names = {("tensor", "all_gather"): 2 * times, ("tensor", "reduce_scatter"): 2 * times}
    assert collectives(found) == names
    sizes = {
        sum(size for _, size in one.reads)
        for one in found
        if one.kind is Kind.COLLECTIVE and one.name == "all_gather"
    }
    assert sizes == {2 * BATCH * TIME * HIDDEN // 2}
    norms = (2 * BLOCKS + 1) * HIDDEN
    assert parameters(LLAMA, tensor=2) - norms == (parameters(LLAMA) - norms) // 2


def test_without_sequence_parallelism_all_reduces_replace_scatters() -> None:
    found = operations(LLAMA, tensor=2, sequence_parallel=False)
    assert flops(found) == flops(operations(LLAMA, tensor=2))
    # After the embedding, attention and MLP; in backward, also before the head.
    assert collectives(found) == {("tensor", "all_reduce"): 2 * (2 * BLOCKS + 1)}
    workloads = [
        workload_of(Model("", LLAMA), replace(ONE, tensor=2, sequence_parallel=sequence))
        for sequence in (True, False)
    ]
    split, whole = (one.segments[one.forward_segments - 1].end_bytes for one in workloads)
    assert whole > split


def test_a_whole_vocabulary_gathers_the_logits() -> None:
    found = operations(LLAMA, tensor=2, split_vocabulary=False)
    products = 2 * BLOCKS + 1
    assert collectives(found) == {
        ("tensor", "all_gather"): products + 1 + 2 * BLOCKS,
        ("tensor", "reduce_scatter"): 2 * BLOCKS + products,
    }
    more = parameters(LLAMA, tensor=2, split_vocabulary=False) - parameters(LLAMA, tensor=2)
    assert more == 48 * HIDDEN // 2
    tied = replace(LLAMA, tied_embeddings=True)  # so the head is not split either
    found = operations(tied, tensor=2, split_vocabulary=False)
    assert collectives(found)["tensor", "all_gather"] == products + 2 * BLOCKS


def test_logits_that_the_training_loop_keeps_are_alive_in_backward() -> None:
    shape = replace(LLAMA, vocab=4800, loss="compute")
    peaks = [
        max(segment.peak_bytes for segment in workload_of(Model("", one), ONE).segments)
        for one in (shape, replace(shape, keeps_logits=True))
    ]
    assert peaks[1] - peaks[0] == pytest.approx(2 * BATCH * TIME * 4800, rel=0.02)


def test_context_parallelism_divides_queries_and_gathers_keys_again_for_backward() -> None:
    found = operations(LLAMA, context=2)
    assert flops(found) == flops(operations(LLAMA)) // 2
    assert collectives(found) == {
        ("context", "all_gather"): 2 * 2 * BLOCKS,
        ("context", "reduce_scatter"): 2 * BLOCKS,
    }
    shapes = {one.shape for one in found if one.kind is Kind.ATTENTION}
    assert shapes == {(BATCH, 4, TIME // 2, TIME, 8)}
    assert parameters(LLAMA, context=2) == parameters(LLAMA)


def test_expert_parallelism_divides_experts_and_exchanges_tokens() -> None:
    found = operations(EXPERTS, expert=2)
    assert flops(found) == flops(operations(EXPERTS))
    assert collectives(found) == {("expert", "all_to_all"): 4 * BLOCKS}
    experts = BLOCKS * 4 * 3 * HIDDEN * 64
    assert parameters(EXPERTS) - parameters(EXPERTS, expert=2) == experts // 2


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_stage_may_have_a_single_block(mode: Any) -> None:
    forecaster = Forecaster(Model("", LLAMA), machine_of("4xA100"))
    found = {
        stages: forecaster.forecast(
            replace(ONE, shard_size=1, pipeline=stages, accumulation=4, checkpointing=mode)
        )
        for stages in (2, 4)
    }
    shared = replace(ONE, shard_size=1, pipeline=4, checkpointing=mode)
    assert [unit.name for unit in forecaster.plan(shared, 1).units] == ["", "layers.0"]
    products = (o for o in forecaster.workload(shared, 1).operations if o.kind is Kind.MATMUL)
    recomputed = any(one.is_recomputed for one in products)
    assert recomputed == (mode == "full")
    assert found[4].step.seconds < found[2].step.seconds
    with pytest.raises(ConfigError, match="pipeline=5: expected at most 4 stages, because each"):
        forecaster.forecast(replace(ONE, shard_size=1, pipeline=5))


def test_pipeline_stages_add_up_to_the_model() -> None:
    shape = replace(LLAMA, layers=7)
    stages = [operations(shape, stage, pipeline=3) for stage in range(3)]
    assert sum(map(flops, stages)) == flops(operations(shape))
    assert sum(parameters(shape, stage, pipeline=3) for stage in range(3)) == parameters(shape)
    middle = workload_of(Model("", shape), replace(ONE, pipeline=3), 1)
    assert middle.tokens == BATCH * TIME
    assert middle.segments[-1].end_bytes == 0
    assert middle.sent_bytes == 2 * BATCH * TIME * HIDDEN
    divided = workload_of(Model("", shape), replace(ONE, pipeline=3, tensor=2, context=2), 1)
    assert divided.sent_bytes == middle.sent_bytes // 4


def test_flops_of_a_pipeline_are_a_mean_over_its_stages() -> None:
    forecaster = Forecaster(Model("", LLAMA), machine_of("8xA100"))
    whole = forecaster.forecast(replace(ONE, shard_size=8, checkpointing="full")).step
    divided = replace(ONE, pipeline=2, accumulation=2, checkpointing="full")
    found = forecaster.forecast(divided).step
    assert (found.model_flops, found.hardware_flops) == (whole.model_flops, whole.hardware_flops)


def test_a_pipeline_is_as_slow_as_its_slowest_stage() -> None:
    """Of 7 blocks on 3 stages the first has 3, and the last has 2 and a small head."""
    machine, configuration = machine_of("3xA100"), replace(ONE, shard_size=1, pipeline=3)
    seconds = {}
    for layers in (6, 7):
        forecaster = Forecaster(Model("", replace(LLAMA, layers=layers)), machine)
        found = forecaster.forecast(configuration)
        seconds[layers] = found.step.seconds
        blocks = {one.unit for one in found.step.replayed.events[0]} - {0}
        assert len(blocks) == len(forecaster.plan(configuration, found.stage).units) - 1
    assert seconds[7] > 1.1 * seconds[6]


@pytest.mark.parametrize("pipeline", [1, 3])
def test_the_chart_of_memory_is_that_of_the_slowest_stage_to_its_end(pipeline: int) -> None:
    """With 8,000 tokens in the vocabulary, the last of 3 stages needs the most memory."""
    configuration = replace(ONE, shard_size=1, pipeline=pipeline)
    model = Model("", replace(LLAMA, layers=7, vocab=8000))
    forecaster = Forecaster(model, machine_of(f"{pipeline}xA100"))
    found = forecaster.forecast(configuration)
    ranking: Any = SimpleNamespace(winner=found)
    unread: Any = None
    samples = Planned(forecaster, ranking, [], "", "", unread).recording.memory
    timeline = forecaster.memory_of_stage(configuration, found.stage).timeline
    assert (found.memory.timeline == timeline) == (pipeline == 1)
    assert max(one.activations for one in samples) == max(one.activations for one in timeline)
    assert samples[-1].activations == 0


def test_selective_checkpointing_keeps_results_of_reduce_scatters() -> None:
    found = operations(LLAMA, tensor=2, checkpointing="selective")
    again = Counter(one.name for one in found if one.kind is Kind.COLLECTIVE and one.is_recomputed)
    assert again == {"all_gather": 2 * BLOCKS}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor": 3}, "tensor=3: expected a divisor of vocab=48|heads=4"),
        ({"expert": 4}, "expert=4: expected a divisor of experts=6"),
        ({"context": 3}, "sequence=32: expected a multiple of context x tensor"),
        (
            {"pipeline": 2, "accumulation": 2, "chunks": 4},
            "chunks=4: expected 4 blocks to be a multiple of pipeline x chunks = 2 x 4",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_refused(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        operations(replace(LLAMA, experts=6), **degrees)


def test_other_models_are_not_divided() -> None:
    with pytest.raises(ConfigError, match="a T5 cannot be divided"):
        operations(replace(LLAMA, arch="t5"), tensor=2)
