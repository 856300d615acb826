"""Quantized wires and replicas that train independently, as `shardwise plan` predicts them."""

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.options import parse_outer, parse_wire
from shardwise.forecast.planned import plan_of
from shardwise.forecast.time.traffic import sent_bytes

SHAPE = Shape(arch="llama", layers=4, hidden=1024, heads=8, vocab=8000, ffn=2816)
BASE = Configuration(shard_size=16, sequence=512, micro_batch=1)
SLOW, FAST = "16xA100-80GB:100", "16xA100-80GB:3200"
WIRE = sw.Wire(gather="int8", reduce="int4")


def forecast(cluster: str, configuration: Configuration) -> Forecast:
    return Forecaster(Model("model", SHAPE), machine_of(cluster)).forecast(configuration)


def test_texts_become_options() -> None:
    assert parse_wire(None) == sw.Wire()
    text = "gather=int8, reduce=int4,block=128,error_feedback=true"
    assert parse_wire(text) == sw.Wire("int8", "int4", 128, error_feedback=True)
    assert parse_outer("every=16,replicas=4,mixing=0.5,dtype=bfloat16") == (
        sw.Outer(every=16, mixing=0.5, dtype="bfloat16"),
        4,
    )
    for parse, wrong, message in (
        (parse_wire, "gathers=int8", "--wire gathers=int8: expected one or more of gather="),
        (parse_wire, "", "--wire : expected one or more of gather="),
        (parse_outer, "", "--outer : expected one or more of replicas="),
        (parse_outer, "every", "--outer every: expected one or more of replicas="),
        (parse_outer, "replicas=1", "expected replicas to be 2 or more, got 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(wrong)
    with pytest.raises(PlanError, match=r"outer_replicas=2: expected 2 or more with outer="):
        replace(BASE, outer_replicas=2)


def test_a_wire_pays_where_the_network_is_slow() -> None:
    speedups = []
    for cluster in (SLOW, FAST):
        plain, quantized = (
            forecast(cluster, replace(BASE, wire=wire)) for wire in (sw.Wire(), WIRE)
        )
        speedups.append(plain.step.seconds / quantized.step.seconds)
        assert quantized.memory.peak.parameters == plain.memory.peak.parameters
        assert quantized.step.model_flops == plain.step.model_flops
    assert speedups[0] > 1.3
    assert speedups[0] > speedups[1]


def test_a_wire_sends_fewer_bytes() -> None:
    """Of gathers in bfloat16, int8 sends a half; of reductions in float32, int4 an eighth."""
    model = Model("model", SHAPE).build(BASE)
    plain, gather, reduce = (
        sent_bytes(plan_of(model, replace(BASE, wire=wire))).total
        for wire in (sw.Wire(), sw.Wire(gather="int8"), sw.Wire(reduce="int4"))
    )
    size = sum(p.numel() for p in model.parameters()) * 15 / 16
    assert plain - reduce == pytest.approx(4 * size * (1 - 0.129), rel=0.02)
    gathered = 2 * 2 * size  # blocks twice, the root once
    assert 0.35 * gathered < plain - gather < 0.5 * gathered


@pytest.mark.parametrize("wire", [sw.Wire(), WIRE], ids=["exact", "quantized"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp"])
def test_no_step_is_shorter_than_its_bytes_take(strategy: str, wire: sw.Wire) -> None:
    """One GPU per node sends at most 1.25 GB/s."""
    size = {"ddp": 1, "hsdp": 4, "hfsdp": 4}.get(strategy, 16)
    one = replace(BASE, strategy=strategy, wire=wire, shard_size=size, replicas=16 // size)
    plan = plan_of(Model("model", SHAPE).build(one), one)
    seconds = sent_bytes(plan).total / 1.25e9
    assert forecast("16xA100-80GB/1:10", one).step.seconds > seconds


def test_hfsdp_reduces_in_rows_first() -> None:
    """It sends as much as hsdp within a node, and half as much between nodes."""
    seconds = {}
    for strategy in ("hsdp", "hfsdp", "fsdp"):
        size = 16 if strategy == "fsdp" else 8
        one = replace(BASE, strategy=strategy, shard_size=size, replicas=16 // size)
        one = replace(one, reshard_after_forward=False)
        seconds[strategy] = forecast(SLOW, one).step.exposed_seconds
    assert seconds["hfsdp"] < seconds["hsdp"] < seconds["fsdp"]


def test_replicas_that_train_independently_exchange_rarely() -> None:
    one = forecast(SLOW, BASE)
    outer = sw.Outer(every=32)
    apart = replace(BASE, shard_size=8, outer=outer, outer_replicas=2)
    assert (apart.world_size, apart.global_batch) == (16, 16)
    two = forecast(SLOW, apart)
    assert two.step.tokens_per_second > 1.3 * one.step.tokens_per_second
    every_step = forecast(SLOW, replace(apart, outer=replace(outer, every=1)))
    share = every_step.step.breakdown["outer"] / two.step.breakdown["outer"]
    assert share == pytest.approx(32, rel=0.01)
    hidden = forecast(SLOW, replace(apart, outer=replace(outer, delay=8)))
    assert hidden.step.breakdown["outer"] < two.step.breakdown["outer"]
    alone = forecast(SLOW, replace(BASE, shard_size=8))
    trained = Model("model", SHAPE).num_parameters
    exact = forecast(SLOW, replace(apart, outer=replace(outer, dtype="float32")))
    for found, copies in ((two, 3), (exact, 2)):  # int4 keeps rounding errors, too
        added = found.memory.timeline[0].optimizer - alone.memory.timeline[0].optimizer
        assert added == pytest.approx(copies * 4 * trained / 8, rel=0.01)


def test_a_search_divides_the_ranks_and_the_batch_over_replicas() -> None:
    found = sw.estimate(
        "gpt2", cluster="16xH100", sequence=128, global_batch=64, outer="replicas=4,every=8",
        strategies=["fsdp"], checkpointing=["none"],
    )  # fmt: skip
    configuration = found.configuration
    assert (configuration.shard_size, configuration.outer_replicas) == (4, 4)
    assert configuration.global_batch == 64
    assert "4 replicas of fsdp over 4" in str(found)
    assert "row = sw.Outer(every=8)" in found.code
    with pytest.raises(ConfigError, match="replicas=3: expected a divisor of 16 ranks"):
        sw.estimate("gpt2", cluster="16xH100", outer="replicas=3")
