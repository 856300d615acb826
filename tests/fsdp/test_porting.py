"""Configurations of DeepSpeed and accelerate are converted to arguments of `fully_shard`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.fsdp.porting import options_from_accelerate, options_from_deepspeed
from tests.fsdp.models import Block, make_net


@pytest.mark.parametrize(
    ("stage", "name"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "fsdp"), (None, "ddp")]
)
def test_zero_stages(stage: int | None, name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}} if stage is not None else {}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert sw.Strategy.from_deepspeed(config).name == name
    assert sw.Strategy.from_deepspeed(path).name == name


def test_an_unknown_zero_stage_is_refused() -> None:
    with pytest.raises(sw.PlanError, match=r"zero_optimization.stage=4: expected 0, 1, 2 or 3"):
        sw.Strategy.from_deepspeed({"zero_optimization": {"stage": 4}})


def test_a_deepspeed_configuration() -> None:
    options = options_from_deepspeed(
        {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "zero_hpz_partition_size": 8,
            },
        }
    )
    assert options["strategy"].name == "fsdp"
    assert options["mp_policy"].param_dtype == torch.bfloat16
    assert options["offload_policy"] == sw.CPUOffloadPolicy(pin_memory=True, parameters=False)
    assert options["reshard_after_forward"] == 8


def test_unsupported_deepspeed_settings_are_refused() -> None:
    for zero, message in (
        ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.device='nvme'"),
    ):
        with pytest.raises(sw.PlanError, match=message):
            options_from_deepspeed({"zero_optimization": zero})


def test_mics_shard_size_becomes_sharding_factor() -> None:
    options = options_from_deepspeed({"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert (options["strategy"].name, options["sharding_factor"]) == ("hsdp", 2)


def test_an_accelerate_configuration() -> None:
    options = options_from_accelerate(
        {
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block",
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_offload_params": "true",
                "fsdp_backward_prefetch": "NO_PREFETCH",
                "fsdp_use_orig_params": True,
            },
        },
        make_net(),
    )
    assert options["strategy"] == "fsdp"
    assert options["reshard_after_forward"] is False
    assert options["units"] == {Block}
    assert options["offload_policy"] == sw.CPUOffloadPolicy()
    assert options["prefetch"] == 0
    assert options["mp_policy"].param_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"sharding_strategy": 1}, "strategy", "fsdp"),
        ({"sharding_strategy": "NO_SHARD"}, "strategy", "ddp"),
        ({"sharding_strategy": 4}, "strategy", "hsdp"),
        ({"fsdp_reshard_after_forward": False}, "reshard_after_forward", False),
        ({"fsdp_reshard_after_forward": True}, "reshard_after_forward", None),
        ({"min_num_params": 2000}, "units", 2000),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "units", "auto"),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, "units", {Block}),
    ],
    ids=str,
)
def test_accelerate_keys(config: dict[str, Any], key: str, value: object) -> None:
    assert options_from_accelerate(config, make_net())[key] == value


def test_a_class_that_the_model_lacks_is_refused() -> None:
    config = {"transformer_layer_cls_to_wrap": "T5Block"}
    with pytest.raises(sw.PlanError, match="T5Block is not in Net"):
        options_from_accelerate(config, make_net())


def test_converted_options_work_with_fully_shard() -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    model = sw.fully_shard(make_net().float(), units=Block, **options_from_deepspeed(config))
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    model(torch.zeros(1, 4))
    assert seen == [torch.bfloat16]
