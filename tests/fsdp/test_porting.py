"""Configurations of DeepSpeed and accelerate are converted to arguments of `fully_shard`."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.fsdp.porting import options_from_accelerate, options_from_deepspeed
from tests.fsdp.models import Block, make_net
from tests.ranks import on_ranks


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


@on_ranks(2)
def test_buffers_are_those_of_ddp_with_the_hook_of_the_documentation(tmp_path: Path) -> None:
    def copy_buffers(model: nn.Module, *_: object) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    theirs = DistributedDataParallel(copy.deepcopy(net))
    ours = sw.fully_shard(net, strategy="ddp")
    without = copy.deepcopy(ours)
    ours.register_forward_pre_hook(copy_buffers)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        batch = torch.randn(5, 4).double()
        for model in (theirs, ours, without):
            model(batch).square().mean().backward()
    for model in (theirs, ours, without):
        model.eval()
    outputs = [model(torch.ones(1, 4).double()) for model in (theirs, ours, without)]
    assert torch.allclose(outputs[1], outputs[0], rtol=1e-12)
    assert dist.get_rank() == 0 or not torch.allclose(outputs[2], outputs[0], rtol=1e-3)
    sw.save(tmp_path / "saved", model=without)
    sw.load(tmp_path / "saved", model=without)
    assert torch.allclose(without(torch.ones(1, 4).double()), outputs[0], rtol=1e-12)
