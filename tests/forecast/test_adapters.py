"""Adapters: compared with peft, with a dense layer, and with real steps of ranks."""

import ast
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.adapters import Adapters, adapters_of, parse_adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.models.adapted import (
    LoRALinear,
    NF4Linear,
    adapt,
    dequantize_nf4,
    quantize_nf4,
)
from shardwise.forecast.models.model import Model, resolve_model
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import call_of
from shardwise.train.config import Config, ModelConfig, ShardConfig
from shardwise.train.planned import config_of, toml_of

TINY = Shape(arch="llama", layers=3, hidden=128, heads=4, vocab=1000, ffn=256)
KINDS = {
    "LoRA": Adapters(rank=8),
    "QLoRA": Adapters(rank=8, quantized=True),
    "DoRA": Adapters(rank=8, dora=True),
}


@pytest.mark.parametrize("shape", [(64, 64), (48, 100), (1000, 130), (2, 1)])
def test_weights_in_4_bits_are_close(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    codes, scales, outer = quantize_nf4(weight)
    assert (codes.numel(), scales.numel()) == (weight.numel() // 2, -(-weight.numel() // 64))
    assert outer.numel() == -(-scales.numel() // 256)
    decoded = dequantize_nf4(codes, scales, outer, shape, torch.float32)
    largest = weight.abs().max()
    assert (decoded - weight).abs().max() <= 0.16 * largest + largest / 255
    on_meta = [one.shape for one in quantize_nf4(weight.to("meta"))]
    assert on_meta == [codes.shape, scales.shape, outer.shape]


def test_a_quantized_layer_has_the_gradients_of_its_decoded_weight() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 32)
    quantized = NF4Linear(linear)
    x = torch.randn(5, 3, 96, requires_grad=True)
    expected = nn.functional.linear(x, quantized.weight, linear.bias)
    found = quantized(x)
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_computes_what_peft_computes(dora: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(24, 16, bias=False)
    config: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], use_dora=dora)
    theirs: Any = peft.get_peft_model(nn.Sequential(nn.Linear(24, 16, bias=False)), config)
    layer = theirs.base_model.model[0]
    layer.base_layer.weight.data.copy_(base.weight)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    ours = LoRALinear(base, Adapters(rank=4, alpha=8, dora=dora), torch.float32)
    ours.lora_A.weight.data.copy_(layer.lora_A["default"].weight)
    ours.lora_B.weight.data.copy_(layer.lora_B["default"].weight)
    if dora:
        assert ours.magnitude is not None
        layer.lora_magnitude_vector["default"].weight.data.copy_(ours.magnitude)
    x = torch.randn(3, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_options_and_files_are_read(tmp_path: Path) -> None:
    assert adapters_of(None, qlora=True) == Adapters(quantized=True)
    found = parse_adapters("r=8, alpha=32,targets=q_proj+v_proj,dropout=0.1,dora=true")
    assert found == Adapters(rank=8, alpha=32, targets=("q_proj", "v_proj"), dropout=0.1, dora=True)
    assert parse_adapters("targets=q_proj").targets == ("q_proj",)
    for pattern in (r"layers\.\d+\.self_attn\.(q|v)_proj", r"layers\.[0-9]{1,2}\.up"):
        assert parse_adapters(f"targets={pattern},r=8") == Adapters(rank=8, targets=pattern)
    config: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"])
    config.save_pretrained(str(tmp_path))
    read = parse_adapters(str(tmp_path), quantized=True)
    assert read == Adapters(rank=4, alpha=8, targets=("q_proj", "v_proj"), quantized=True)
    for text, message in {
        "r=x": "r=x: expected a rank of 1 or more",
        "rank=8": "expected one or more of r=, alpha=, targets=, dropout=, dora=",
        "r=0": "r=0: expected a rank of 1 or more",
        "modules_to_save": "expected one or more of r=",
        "dora=yes": "dora=yes: expected true or false",
        "alpha=nan": "alpha=nan: expected a number",
        "": "expected one or more of r=",
        str(tmp_path / "no.json"): "No such file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_adapters(text)
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"modules_to_save=.* pass the adapted model instead"):
        adapters_of(config, qlora=False)
    for layers in (0, [0]):
        config = peft.LoraConfig(target_modules=["up"], layers_to_transform=layers)
        with pytest.raises(ConfigError, match=r"layers_to_transform=.* is not modelled"):
            adapters_of(config, qlora=False)
    with pytest.raises(ConfigError, match="target_modules=5: expected names of layers"):
        adapters_of({"target_modules": 5}, qlora=False)
    with pytest.raises(ConfigError, match="lora=3: expected options such as 'r=16'"):
        adapters_of(3, qlora=False)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="peft_type=IA3: expected LORA"):
        parse_adapters(str(tmp_path))


def test_targets_have_the_names_of_transformers() -> None:
    def named(targets: str | tuple[str, ...]) -> set[str]:
        model = adapt(
            build(TINY), Adapters(targets=targets), base=torch.bfloat16, trained=torch.float32
        )
        names = (name for name, one in model.named_modules() if isinstance(one, LoRALinear))
        return {name.rpartition(".")[2] for name in names}

    assert named("all-linear") == {"q", "k", "v", "out", "gate", "up", "down"}
    assert named(("q_proj", "v_proj", "down_proj")) == {"q", "v", "down"}
    assert named(r"layers\.\d+\.mlp\.(up|down)") == {"up", "down"}, "a regular expression"
    assert named(("attention.q", "mlp.up")) == {"q", "up"}, "not a regular expression"
    with pytest.raises(ConfigError, match="no such linear layer; expected all-linear or some of q"):
        named(("c_proj",))
    with pytest.raises(ConfigError, match=r"targets=\*_proj: nothing to repeat"):
        named("*_proj")
    with pytest.raises(PlanError, match="tensor=2: adapters of divided layers are not modelled"):
        Configuration(tensor=2, adapters=Adapters())


@pytest.mark.parametrize(
    "targets", ["all-linear", ("0",), ("inner.0", "1"), r"inner\.[01]"], ids=str
)
def test_code_and_settings_for_the_trainer_give_peft_the_same_targets(targets: Any) -> None:
    adapters = Adapters(rank=2, targets=targets)
    base = Config(model=ModelConfig(path="model"), shard=ShardConfig(nproc=1))
    written = tomllib.loads(toml_of(config_of(Configuration(adapters=adapters), base)))
    found = written["model"].get("lora_targets", "all-linear")
    code = call_of(Configuration(adapters=adapters))
    modules = next(line for line in code.splitlines() if "target_modules" in line)
    assert ast.literal_eval(modules.strip().removeprefix("target_modules=")[:-1]) == found

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict({"inner": layers, "lm_head": nn.Linear(2, 2)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=found), model)  # not empty


def is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Whether adapters of all linear layers update the parameter."""
    return name.startswith("layers.") and parameter.dim() > 1


def test_adapters_of_8_billion_frozen_parameters_need_18_to_21_gb() -> None:
    model, frozen, trained = resolve_model("llama-3-8b"), 8_030_261_248, 41_943_040
    configuration = Configuration(sequence=1024, checkpointing="full", adapters=Adapters(rank=16))
    memory = Forecaster(model, machine_of("1xH100")).memory(configuration).memory
    assert memory.timeline[0].parameters == 2 * frozen + 4 * trained
    assert 18e9 < memory.device_bytes < 21e9


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_have_gradients_and_states(kind: str) -> None:
    adapters = KINDS[kind]
    configuration = Configuration(sequence=64, micro_batch=2, adapters=adapters)
    model = Model("tiny", TINY)
    found = Forecaster(model, machine_of("1xH100")).forecast(configuration)
    trained = model.num_trained(adapters)
    in_blocks = sum(p.numel() for n, p in build(TINY).named_parameters() if is_weight(n, p))
    others = model.num_parameters - in_blocks
    start = found.memory.timeline[0]
    base = in_blocks // 2 if adapters.quantized else 2 * in_blocks
    assert start.parameters == base + 2 * others + 4 * trained
    assert start.optimizer == 2 * 4 * trained
    assert max(one.gradients for one in found.memory.timeline) == 4 * trained
    whole = Forecaster(model, machine_of("1xH100")).forecast(replace(configuration, adapters=None))
    assert 0.6 < found.step.model_flops / whole.step.model_flops < 0.95


def test_a_cache_of_forecasts_tells_adapters_apart() -> None:
    forecaster = Forecaster(Model("tiny", TINY), machine_of("2xH100"))
    base = Configuration(shard_size=2, sequence=64)
    found = [
        forecaster.forecast(replace(base, adapters=adapters)).memory.device_bytes
        for adapters in (None, *KINDS.values())
    ]
    assert len(set(found)) == 4
