"""``sw.estimate``: names, functions, modules and models of peft; and what it returns."""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import shardwise as sw
from shardwise._private import FakeTensorMode
from shardwise.errors import ConfigError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.search.applying import apply_to
from shardwise.forecast.search.candidates import Goal
from shardwise.forecast.view.estimate import Estimate
from shardwise.runtime.module import handle_of
from tests.forecast.calibrations import calibration
from tests.models import llama_config
from tests.ranks import on_ranks

SMALL: dict[str, Any] = {"cluster": "2xH100", "sequence": 32, "global_batch": 4}


class Images(nn.Module):
    """Takes images and returns the logits of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mean(-1)  # [batch, 32]
        for block in self.blocks:
            x = x + block(x).relu()
        logits: Tensor = self.head(x)
        return logits


def test_a_name_has_the_figures_of_the_command() -> None:
    found = sw.estimate("gpt2", **SMALL, strategies=["fsdp"], checkpointing=["none", "full"])
    assert found.fits
    assert found.verdict == "fits"
    assert found.configuration.world_size == 2
    assert found.device_bytes == sum(found.memory.values())
    assert found.memory["optimizer"] == pytest.approx(2 * 4 * 124.44e6 / 2, rel=0.001)
    assert found.tokens_per_second == pytest.approx(4 * 32 / found.step_seconds)
    assert sum(found.step.breakdown.values()) == pytest.approx(found.step_seconds)
    assert 0 < found.mfu < 1
    assert found.reasons[0].startswith("Bound by ")
    assert "sw.fully_shard(" in found.code
    assert str(found).startswith("gpt2 on 2xH100-SXM-80GB: fsdp over 2, micro-batches ")
    assert len(found.ranking.fitting) > 2


def test_a_function_and_a_module_are_forecast_alike() -> None:
    torch.manual_seed(0)
    module = Images()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    options: dict[str, Any] = {
        **SMALL,
        "sequence": 1,
        "inputs": lambda batch, _length: torch.empty(batch, 3, 16, 16),
        "strategies": ["fsdp"],
    }
    found, built = sw.estimate(module, **options), sw.estimate(Images, **options)
    assert found.forecast.memory == built.forecast.memory
    assert found.step_seconds == built.step_seconds
    assert (found.model, built.model) == ("Images", "Images")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_loss_is_the_users() -> None:
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append(tuple(output.shape))
        return output.square().mean()

    inputs = lambda batch, _length: {"images": torch.empty(batch, 3, 16, 16)}  # noqa: E731
    sw.estimate(
        Images, **{**SMALL, "sequence": 1}, inputs=inputs, loss=loss, micro_batches=[2],
        strategies=["fsdp"], checkpointing=["none"],
    )  # fmt: skip
    assert set(seen) == {(2, 10)}


class Named(nn.Module):
    """Has blocks with names instead of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second")})

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks["second"](self.blocks["first"](x)).square().mean()
        return loss


@pytest.mark.parametrize("units", ["auto", "Linear", 60, ("Linear",), None])
def test_units_of_any_kind_are_forecast(units: Any) -> None:
    inputs = lambda batch, _length: torch.empty(batch, 8)  # noqa: E731
    options: dict[str, Any] = {"shard_size": 2, "units": units, "sequence": 1}
    one = Configuration(**options, checkpointing="full" if units == "auto" else "none")
    assert sw.estimate(Named, cluster="2xH100", configuration=one, inputs=inputs).fits
    shape = Shape(arch="gpt", layers=4, hidden=32, heads=2, vocab=100)
    names: dict[Any, Any] = {
        "Linear": "Block",
        ("Linear",): ("Block", "Embedding", "Head"),
        60: 3000,
    }
    forecaster = Forecaster(Model("gpt", shape), machine_of("2xH100"))
    one = replace(one, units=names.get(units, units), sequence=16)
    assert forecaster.forecast(one).step.seconds > 0
    planned = [unit.name for unit in forecaster.plan(one).units]
    assert sorted(forecaster.workload(one).units) == sorted(planned)


def test_a_model_without_blocks_is_one_unit() -> None:
    found = sw.estimate(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        cluster="2xH100", sequence=1, global_batch=4,
        inputs=lambda batch, _length: torch.empty(batch, 8),
    )  # fmt: skip
    assert found.configuration.units is None
    assert found.configuration.checkpointing == "none"
    assert "units=" not in found.code
    with pytest.raises(ConfigError, match="checkpointing=full: the model has no repeated blocks"):
        Goal(global_batch=4, settings=found.configuration, checkpointing=("full",))


def llama_on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(vocab_size=300))


@cache
def estimate_of_whole_llama() -> Estimate:
    return sw.estimate(llama_on_meta(), **SMALL, strategies="fsdp", checkpointing=["none"])


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_only_what_peft_adds_has_states(options: dict[str, Any]) -> None:
    whole = estimate_of_whole_llama()
    lora: Any = LoraConfig(r=4, target_modules=r".*\.(q|v)_proj", use_rslora=True, **options)
    adapted: Any = get_peft_model(llama_on_meta(), lora)
    found = sw.estimate(adapted, **SMALL, strategies="fsdp", checkpointing=["none"])
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found.memory["optimizer"] == pytest.approx(2 * 4 * trained / 2, rel=0.02)
    assert found.memory["optimizer"] < whole.memory["optimizer"] / 2
    assert found.step.model_flops < whole.step.model_flops


def test_one_configuration_is_forecast_without_a_search() -> None:
    configuration = Configuration(shard_size=8, micro_batch=4, sequence=64, prefetch=2)
    found = sw.estimate("gpt2", cluster="8xA100-80GB", configuration=configuration)
    assert found.configuration == configuration
    assert found.ranking.num_compared == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"model None: expected a name, a torch\.nn\.Module or a function"),
        ({"cluster": None}, "cluster 'None': expected COUNTxNAME"),
        ({"cluster": "16xH100:0"}, "0 Gbit/s per node: expected more than 0"),
        ({"micro_batches": [0]}, r"micro_batches\[0\]=0: expected an integer of 1 or more"),
        ({"tensor": "aut"}, "tensor='aut': expected an integer of 1 or more, or \"auto\""),
        ({"offload": ["disk"]}, "offload='disk': expected one of none, optimizer, parameters"),
        ({"wire": "gathr=int8"}, "--wire gathr=int8: .* did you mean 'gather'"),
        ({"wire": 5}, "wire=5: expected a text, such as 'gather=int8"),
        ({"global_batch": "8"}, "global_batch='8': expected 1 or more sequences"),
        ({"global_batch": 8.0}, r"global_batch=8\.0: expected 1 or more sequences"),
        ({"micro_batches": 3}, "micro_batch=3: expected a divisor of the 2 sequences per rank"),
        ({"strategies": 5}, "strategy=5: expected one of ddp"),
        ({"optimizer": 5}, "optimizer=5: expected one of adamw"),
        ({"optimizer": "torch.optim:AdamX"}, "torch.optim has no function 'AdamX'"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64: expected one of torch\.bfloat16"),
        ({"inputs": 5}, "inputs=5: expected a function"),
        ({"loss": torch.mean}, "loss=.*: model 'gpt2' computes its own; leave it out"),
        ({"configuration": Configuration(shard_size=4)}, "it is for 4 ranks, but .* has 2 devices"),
        ({"configuration": 5}, "configuration=5: expected that of another estimate"),
        (
            {"configuration": Configuration(shard_size=1, replicas=2)},
            "replicas=2: strategy 'fsdp' has no replicas; set it to 1, or use 'hsdp'",
        ),
        ({"chunks": 2}, "chunks=2: expected pipeline to be 2 or more, got 1"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    options = {**SMALL, "model": "gpt2"} | change
    with pytest.raises((ConfigError, sw.PlanError), match=message):
        sw.estimate(options.pop("model"), **options)


def test_a_model_that_cannot_be_traced_is_an_error_with_the_way_out() -> None:
    options: dict[str, Any] = {**SMALL, "strategies": "fsdp", "checkpointing": ["none"]}
    with (
        mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "callHandlers") as logged,
        pytest.raises(sw.PlanError, match=r"forward of Linear failed .*; pass inputs="),
    ):
        sw.estimate(nn.Linear(2, 2), **options)
    logged.assert_not_called()
    with pytest.raises(sw.PlanError, match="the loss of Images depends on no trained parameter"):
        sw.estimate(
            Images().requires_grad_(requires_grad=False),
            **options, inputs=lambda batch, _: torch.empty(batch, 3, 16, 16),
        )  # fmt: skip


def test_a_cpu_keeps_nothing_on_a_host(tmp_path: Path) -> None:
    calibration().write(tmp_path / "machine.json")
    found = sw.estimate(
        "gpt2", **{**SMALL, "cluster": f"2x{tmp_path}/machine.json"}, objective="memory",
        strategies="fsdp", dtype=torch.float32,
    )  # fmt: skip
    assert {one.configuration.offload for one in found.ranking.fitting} == {"none"}
    assert found.host_bytes == 0


@on_ranks(2)
def test_apply_shards_as_estimated() -> None:
    torch.manual_seed(0)
    model = Images()
    options: dict[str, Any] = {
        "sequence": 1, "global_batch": 4, "dtype": torch.float32, "strategies": ["zero2"],
        "checkpointing": ["full"], "inputs": lambda batch, _: torch.empty(batch, 3, 16, 16),
    }  # fmt: skip
    found = sw.estimate(model, cluster="2xH100", **options)
    assert found.apply(model) is model
    plan = handle_of(model).runtime.plan
    assert plan.strategy.name == "zero2"
    assert len(plan.units) == 5
    model(torch.ones(2, 3, 16, 16)).square().mean().backward()
    adapted = replace(found.configuration, adapters=Adapters(rank=2), checkpointing="none")
    with pytest.raises(sw.PlanError, match="the model has no frozen weights"):
        apply_to(Images(), adapted)
    with pytest.raises(sw.PlanError, match="convert the linear layers"):
        apply_to(Images(), replace(found.configuration, float8="rowwise"))
    wrong = sw.estimate(Images, cluster="4xH100", **options)
    with pytest.raises(sw.PlanError, match="the configuration is for 4 ranks, but there are 2"):
        wrong.apply(Images())


def test_micro_batches_of_a_reproducible_model() -> None:
    """A rank holds a sum of whole gradients for each bit of the micro-batches before the last."""
    found = sw.estimate("gpt2", **SMALL | {"global_batch": 16}, reproducible=16)
    configuration = found.configuration
    assert configuration.accumulation * configuration.data_parallel == 16
    assert configuration.micro_batch == 1
    assert "reproducible=16" in found.code
    fewer = replace(configuration, reproducible=4, accumulation=2)
    held = [
        sw.estimate("gpt2", **SMALL, configuration=one).forecast.memory.timeline[-1]
        for one in (configuration, fewer)
    ]
    assert held[0].communication == 3 * held[1].communication  # of 7 and 1 micro-batches
    with pytest.raises(sw.PlanError, match=r"reproducible=8: expected .* = 16"):
        sw.estimate("gpt2", **SMALL, configuration=replace(configuration, reproducible=8))
    with pytest.raises(ConfigError, match="reproducible=16: expected a divisor of the 24 seq"):
        sw.estimate("gpt2", **SMALL | {"global_batch": 24}, reproducible=16)
