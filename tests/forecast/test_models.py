"""Tests of models by name, from configuration files and from functions, and their workloads."""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models import model as models
from shardwise.forecast.models.model import Model, resolve_model, workload_of
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import call_of, plan_of, precision_of
from shardwise.forecast.trace.recomputing import modes_by_name
from shardwise.forecast.trace.tracing import trace
from shardwise.forecast.work import Workload
from shardwise.plan.policies import choose_units
from shardwise.schedule.events import EventKind

SMALL = Configuration(sequence=16, micro_batch=2)
SHAPES = {
    "gpt": Shape(arch="gpt", layers=6, hidden=32, heads=4, vocab=50, dropout=0.1, has_bias=True),
    "t5": Shape(arch="t5", layers=5, hidden=32, heads=4, vocab=50, tied_embeddings=True),
    "experts": Shape(arch="llama", layers=5, hidden=32, heads=4, vocab=50, experts=4),
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_259_328),
        ("t5-11b", 11_307_321_344),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("qwen-3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_numbers_of_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert resolve_model(name).num_parameters == parameters


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.thorough), "full"])
def test_a_workload_has_the_units_of_the_plan(name: str, mode: Any) -> None:
    model = Model(name, SHAPES[name])
    configuration = replace(SMALL, checkpointing=mode, shard_size=8)
    plan = plan_of(model.build(configuration), configuration)
    workload = workload_of(model, configuration)
    assert workload.units == tuple(unit.name for unit in plan.units)
    assert workload.tokens == 32
    assert workload.segments[0].start_bytes == workload.segments[-1].end_bytes == 0
    forwards = [one for one in workload.segments if one.kind is EventKind.FORWARD]
    num_blocks = len(plan.units) - 1
    assert len(forwards) == len(plan.units) + num_blocks * (mode == "full")


thorough = pytest.mark.thorough
MIXED = ("full", "none", "selective", "none", "selective", "full")
TRAINED = {
    "the last blocks": ("layers.4", "layers.5", "norm", "head"),
    "the head": ("head",),
    "one block": ("layers.3",),
    "the first block": ("layers.0", "embedding"),
}


def assert_traced_as_a_whole(model: Model, configuration: Configuration) -> None:
    module = model.build(configuration)
    units = choose_units(module, "auto")
    whole = trace(
        module,
        [torch.zeros(2, 16, dtype=torch.long)] * 2,
        units=units,
        precision=precision_of(configuration),
        autocast=torch.bfloat16 if configuration.autocast else None,
        checkpointing=modes_by_name(configuration.checkpointing, units[1:]),
    )
    found = workload_of(model, configuration)
    assert (found.units, found.forward_segments) == (whole.units, whole.forward_segments)
    for one, other in zip(found.segments, whole.segments, strict=True):
        assert replace(one, operations=()) == replace(other, operations=())
        assert [(op.name, op.flops) for op in one.operations] == [
            (op.name, op.flops) for op in other.operations
        ]


@pytest.mark.parametrize(
    ("name", "mode", "autocast"),
    [
        ("gpt", "selective", True),
        ("gpt", MIXED, False),
        ("t5", "full", False),
        ("experts", "none", False),
        *(
            pytest.param(*case, marks=thorough)
            for case in product(SHAPES, ("none", "full", "selective"), (False, True))
        ),
    ],
)
def test_a_trace_of_a_few_blocks_equals_that_of_all(name: str, mode: Any, autocast: bool) -> None:
    configuration = replace(SMALL, checkpointing=mode, autocast=autocast)
    assert_traced_as_a_whole(Model(name, SHAPES[name]), configuration)


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=thorough)])
def test_a_partly_frozen_model_is_traced_as_a_whole(mode: Any, trained: tuple[str, ...]) -> None:
    def partly_frozen() -> nn.Module:
        module = build(replace(SHAPES["gpt"], dropout=0.0))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        return module

    model = Model("partly frozen", factory=partly_frozen, keeps_dtypes=True)
    configuration = replace(SMALL, checkpointing=mode)
    assert_traced_as_a_whole(model, configuration)
    on_two = replace(configuration, shard_size=2)
    assert Forecaster(model, machine_of("2xH100")).forecast(on_two).step.seconds > 0


def test_parameters_in_16_bits_stay_in_16_bits() -> None:
    model = Model("half", factory=lambda: build(SHAPES["gpt"]).bfloat16(), keeps_dtypes=True)
    assert model.master_dtype == torch.bfloat16
    configuration = replace(SMALL, master_dtype=model.master_dtype)
    start = Forecaster(model, machine_of("1xH100")).memory(configuration).memory.timeline[0]
    size = 2 * model.num_parameters
    assert (start.parameters, start.optimizer) == (size, 2 * size)
    assert 'master_dtype="keep"' in call_of(configuration)
    assert Model("float32", SHAPES["gpt"]).master_dtype == torch.float32


def flops(workload: Workload) -> int:
    return sum(one.flops for one in workload.operations)


def test_each_block_may_have_its_own_checkpointing_mode() -> None:
    model = Model("gpt", SHAPES["gpt"])
    plain, every_other, full = (
        workload_of(model, replace(SMALL, checkpointing=modes))
        for modes in ("none", ("none", "full") * 3, "full")
    )
    assert flops(full) - flops(every_other) == flops(every_other) - flops(plain)
    with pytest.raises(PlanError, match="a mode for each of the 6 blocks, got 2"):
        workload_of(model, replace(SMALL, checkpointing=("none", "full")))


def test_experts_compute_for_the_tokens_that_they_get() -> None:
    dense, sparse = replace(SHAPES["experts"], experts=0, ffn=2 * 128), SHAPES["experts"]
    router = 3 * 2 * 32 * 32 * 4 * 5
    assert flops(workload_of(Model("", sparse), SMALL)) - router == flops(
        workload_of(Model("", dense), SMALL)
    )


# -- other models --------------------------------------------------------------------------------


class Logits(nn.Module):
    """A user's model that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))
        self.head = nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def test_a_function_builds_a_model() -> None:
    model = resolve_model(f"{__name__}:Logits")
    workload = workload_of(model, SMALL)
    assert workload.units == ("", *(f"blocks.{number}" for number in range(5)))
    tokens = 2 * 16
    assert flops(workload) == 3 * 2 * tokens * 8 * (5 * 8 + 50)


HUGGING_FACE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 50,
}
THE_SAME = Shape(arch="llama", layers=5, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50)


def test_without_transformers_a_hugging_face_configuration_makes_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HUGGING_FACE), encoding="utf-8")
    assert resolve_model(str(file)).shape == THE_SAME
    file.write_text(json.dumps(HUGGING_FACE | {"hidden_size": None}), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"config\.json: hidden_size: expected a number, got None"
    ):
        resolve_model(str(file))
    file.write_text(json.dumps({"model_type": "mamba"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="model_type='mamba' needs transformers; pip install"):
        resolve_model(str(file))


@pytest.mark.thorough  # the import takes ten seconds
def test_a_hugging_face_configuration_makes_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE), encoding="utf-8")
    model = resolve_model(str(tmp_path))
    same = Model("the same", THE_SAME)
    assert model.num_parameters == same.num_parameters
    found, expected = (workload_of(one, SMALL) for one in (model, same))
    assert len(found.units) == len(expected.units) == 1 + 5
    assert flops(found) == flops(expected)
    kept, expected_kept = (
        one.segments[2].end_bytes - one.segments[1].end_bytes for one in (found, expected)
    )
    assert kept == expected_kept, "of a block"
    divided = replace(SMALL, tensor=2, pipeline=2)
    found, expected = (workload_of(one, divided) for one in (model, same))
    assert found == expected


def test_errors_name_the_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'lama-3-8b': .*; did you mean 'llama-3-8b'\?"):
        resolve_model("lama-3-8b")
    with pytest.raises(ConfigError, match="nowhere: no such module"):
        resolve_model("nowhere:model")
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="kv_heads=3: expected a divisor of heads=4"):
        Shape(arch="llama", layers=1, hidden=8, heads=4, kv_heads=3, vocab=8)


def test_traces_of_shapes_are_kept_and_those_of_functions_are_not() -> None:
    shape = replace(SHAPES["gpt"], vocab=51)  # of no other test
    for model, once, twice in ((Model("", shape), 1, 1), (Model("", factory=Logits), 1, 2)):
        with mock.patch.object(models, "trace", wraps=trace) as traced:
            found = workload_of(model, SMALL)
            assert traced.call_count == once
            assert workload_of(model, SMALL) == found
            assert traced.call_count == twice
    with mock.patch.object(models, "trace", wraps=trace) as traced:
        workload_of(Model("", shape), replace(SMALL, micro_batch=1))
        workload_of(Model("", shape, inputs=lambda n, t: (torch.zeros(n, t).long(),) * 2), SMALL)
    assert traced.call_count == 2


def test_losses_differ_in_the_copies_of_their_logits() -> None:
    """In units of float32 logits: what a step has at its peak, beyond the fused linear loss."""
    shape = Shape(arch="llama", layers=2, hidden=64, heads=2, vocab=8192, ffn=64)
    configuration = Configuration(micro_batch=2, sequence=256)
    peaks, keeps = {}, {}
    for loss in ("float32", "compute", "shifted", "fused", "fused_linear"):
        model = Model(loss, replace(shape, loss=loss))
        segments = workload_of(model, configuration).segments
        peaks[loss] = max(one.peak_bytes for one in segments)
        kept = [one.end_bytes for one in segments]
        keeps[loss] = kept[1] - kept[0]
    logits = 4 * 2 * 256 * shape.vocab
    gradient = 2 * 64 * shape.vocab  # of the head's weight
    assert peaks["shifted"] == pytest.approx(peaks["float32"] + 2 * logits, rel=0.02)
    assert peaks["compute"] < peaks["float32"] - logits / 2
    assert peaks["fused"] < peaks["compute"]
    assert peaks["fused_linear"] < logits / 4 + 3 * gradient
    assert keeps["fused_linear"] == keeps["fused"] - 2 * 2 * 256 * shape.ffn, "of the fused gate"
