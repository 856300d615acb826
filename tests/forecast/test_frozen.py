"""Tests that frozen parameters and those in 16 bits are forecast as they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models.model import Model, known_models, workload_of
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import call_of, precision_of
from shardwise.forecast.trace.tracing import trace
from shardwise.plan.policies import choose_units

SHAPE = Shape(arch="gpt", layers=6, hidden=32, heads=4, vocab=50, has_bias=True)
SMALL = Configuration(sequence=16, micro_batch=2)


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        updated: Tensor = self.base(x) + self.up(self.down(x))
        return updated


def adapted_llama() -> nn.Module:
    """Build Llama 3 8B in bfloat16, frozen, with float32 adapters of all layers in its blocks."""
    model = build(known_models()["llama-3-8b"]).bfloat16().requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        if name.startswith("layers.") and isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapted(module))
    return model


def test_adapters_of_8_billion_frozen_parameters_need_18_to_21_gb() -> None:
    model = Model("lora", factory=adapted_llama, keeps_dtypes=True)
    frozen, trained = 8_030_261_248, 41_943_040
    assert (model.num_parameters, model.num_trained()) == (frozen + trained, trained)
    configuration = Configuration(
        sequence=1024, checkpointing="full", master_dtype=model.master_dtype
    )
    memory = Forecaster(model, machine_of("1xH100")).memory(configuration).memory
    assert memory.timeline[0].parameters == 2 * frozen + 4 * trained
    assert memory.timeline[0].optimizer == 2 * 4 * trained
    assert max(moment.gradients for moment in memory.timeline) == 4 * trained
    assert 18e9 < memory.device_bytes < 21e9
    on_eight = Forecaster(model, machine_of("8xH100")).memory(replace(configuration, shard_size=8))
    assert on_eight.memory.timeline[0].parameters == (2 * frozen + 4 * trained) // 8


def test_parameters_in_16_bits_stay_in_16_bits() -> None:
    model = Model("half", factory=lambda: build(SHAPE).bfloat16(), keeps_dtypes=True)
    assert model.master_dtype == torch.bfloat16
    configuration = replace(SMALL, master_dtype=model.master_dtype)
    memory = Forecaster(model, machine_of("1xH100")).memory(configuration).memory
    size = 2 * model.num_parameters
    assert memory.timeline[0].parameters == size
    assert memory.timeline[0].optimizer == 2 * size
    assert 'master_dtype="keep"' in call_of(configuration)
    built_in = Model("float32", SHAPE)
    assert built_in.master_dtype == torch.float32


TRAINED = {
    "the last blocks": ("layers.4", "layers.5", "norm", "head"),
    "the head": ("head",),
    "one block": ("layers.3",),
    "the first block": ("layers.0", "embedding"),
}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.thorough)])
def test_a_trace_of_a_few_blocks_equals_that_of_all(mode: Any, trained: tuple[str, ...]) -> None:
    def partly_frozen() -> nn.Module:
        module = build(SHAPE)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        return module

    model = Model("partly frozen", factory=partly_frozen, keeps_dtypes=True)
    configuration = replace(SMALL, checkpointing=mode)
    module = model.build(configuration)
    units = choose_units(module, "auto")
    whole = trace(
        module,
        [torch.zeros(2, 16, dtype=torch.long)] * 2,
        units=units,
        precision=precision_of(configuration),
        checkpointing=dict.fromkeys(units[1:], mode),
    )
    found = workload_of(model, configuration)
    for one, other in zip(found.segments, whole.segments, strict=True):
        assert replace(one, operations=()) == replace(other, operations=())
        assert [each.name for each in one.operations] == [each.name for each in other.operations]
    forecast = Forecaster(model, machine_of("2xH100")).forecast(
        replace(configuration, shard_size=2)
    )
    assert forecast.step.seconds > 0
