"""8-bit products: which ones, how fast, what they gather, and when they do not pay."""

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.models.model import Model, resolve_model
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.planned import plan_of

H100 = machine_of("8xH100")
BASE = Configuration(shard_size=8, sequence=4096, micro_batch=2, compiled=True)
SMALL = Shape(arch="llama", layers=4, hidden=512, heads=8, vocab=32000, ffn=1536)


def seconds(machine: Machine, size: int, scaling: str) -> tuple[float, float]:
    """Return the seconds of a square product in bfloat16, and in 8 bits with casts."""
    shape = (1, size, size, size)
    wide = machine.matmul_seconds(shape, 2, 3 * 2 * size * size)
    return wide, machine.float8_seconds(shape, scaling, 0)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "delayed", "mxfp8"])
def test_large_products_are_faster_and_small_ones_slower(scaling: str) -> None:
    wide, narrow = seconds(H100, 16_384, scaling)
    assert 1.3 < wide / narrow < 2
    wide, narrow = seconds(H100, 512, scaling)
    assert wide < narrow


def test_a_layer_is_as_fast_as_torchao_measures() -> None:
    """Forward and backward of 4,096 tokens and a weight of 8,192 x 16,384 (torchao's README)."""
    m, k, n = 4096, 8192, 16_384
    wide = narrow = 0.0
    for shape in ((1, m, n, k), (1, m, k, n), (1, n, k, m)):
        moved = 2 * (shape[1] * shape[3] + shape[3] * shape[2] + shape[1] * shape[2])
        wide += H100.matmul_seconds(shape, 2, moved)
        narrow += H100.float8_seconds(shape, "tensorwise", 0)
    assert wide / narrow == pytest.approx(1.39, rel=0.01)


def test_scales_and_operands_that_are_known_before_cost_less() -> None:
    shape = (1, 4096, 4096, 4096)
    tensorwise = H100.float8_seconds(shape, "tensorwise", 0)
    assert H100.float8_seconds(shape, "delayed", 0) < tensorwise
    assert H100.float8_seconds(shape, "tensorwise", 4096 * 4096) < tensorwise


def test_a_large_model_trains_faster_and_a_small_one_does_not() -> None:
    large = Forecaster(resolve_model("llama-3-8b"), H100)
    small = Forecaster(Model("small", SMALL), H100)
    speedups = []
    for forecaster in (large, small):
        one, other = (
            forecaster.forecast(replace(BASE, checkpointing="full", float8=float8))
            for float8 in ("none", "tensorwise")
        )
        speedups.append(one.step.seconds / other.step.seconds)
        assert one.step.model_flops == other.step.model_flops
    assert 1.15 < speedups[0] < 1.7
    assert speedups[1] < 1.02


def test_as_many_tokens_as_the_head_has_rows_make_no_difference() -> None:
    """A micro-batch has 8,192 tokens."""
    speedups = []
    for vocab in (8192, 8256):
        shape = Shape(arch="llama", layers=4, hidden=4096, heads=32, vocab=vocab, ffn=14_336)
        forecaster = Forecaster(Model("large", shape), H100)
        one, other = (
            forecaster.forecast(replace(BASE, float8=float8)).step.breakdown["matmul"]
            for float8 in ("none", "tensorwise")
        )
        speedups.append(one / other)
    assert speedups[0] == pytest.approx(speedups[1], rel=0.01)
    assert speedups[0] > 1.2


def test_tensor_parallel_ranks_gather_in_8_bits() -> None:
    """As with torchao's Float8ColwiseParallel: gathers, but not what is summed."""
    forecaster = Forecaster(resolve_model("llama-3-8b"), H100)
    parallel = replace(BASE, shard_size=2, tensor=4, sequence_parallel=True, float8="tensorwise")
    one, other = (
        forecaster.forecast(replace(parallel, float8_gather=gather)).step.breakdown["collective"]
        for gather in (False, True)
    )
    assert 0.7 < other / one < 0.8, "half of the bytes of one of two kinds, and latency"


def test_the_head_and_attention_stay_in_16_bits() -> None:
    head = Shape(arch="llama", layers=2, hidden=64, heads=2, vocab=128_000, ffn=64)
    forecaster = Forecaster(Model("head", head), H100)
    one, other = (
        forecaster.forecast(replace(BASE, float8=float8)).step.breakdown
        for float8 in ("none", "tensorwise")
    )
    assert one["attention"] == other["attention"]
    assert one["matmul"] < other["matmul"], "small products are slower, and the head is not faster"


def test_weights_of_blocks_are_gathered_in_8_bits() -> None:
    model = Model("small", SMALL).build(BASE)
    wide = plan_of(model, BASE)
    narrow = plan_of(model, replace(BASE, float8="tensorwise", float8_gather=True))
    assert narrow.units[0].gathered_bytes == wide.units[0].gathered_bytes, "the embedding and head"
    assert narrow.units[1].gathered_bytes == wide.units[1].gathered_bytes // 2
    assert narrow.units[1].gradient_bytes == wide.units[1].gradient_bytes
    assert narrow.shard_bytes == wide.shard_bytes


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="float8='tensorwise': A100-SXM-80GB has no 8-bit products"):
        sw.estimate("gpt2", cluster="8xA100-80GB", float8="tensorwise")
    with pytest.raises(PlanError, match="float8_gather=True: expected scales per tensor"):
        replace(BASE, float8="rowwise", float8_gather=True)
    with pytest.raises(PlanError, match="did you mean 'tensorwise'"):
        replace(BASE, float8="tensorwize")  # type: ignore[arg-type]


def test_float32_products_stay() -> None:
    forecaster = Forecaster(Model("small", SMALL), H100)
    base = replace(BASE, compute_dtype=torch.float32)
    one, other = (forecaster.forecast(replace(base, float8=f)) for f in ("none", "tensorwise"))
    assert one.step.seconds == other.step.seconds
