"""Common rules of thumb, as baselines for a forecast."""

from collections.abc import Iterator
from enum import StrEnum

import torch

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import Accelerator
from shardwise.forecast.work import Workload

__all__ = [
    "Rule",
    "accelerate_bytes",
    "deepspeed_stage2_bytes",
    "deepspeed_stage3_bytes",
    "memory_rule",
    "roofline_tokens",
    "six_nd_tokens",
]

_ASSUMED_MFU = 0.4
_LOW_STAGES = ("zero1", "zero2")


class Rule(StrEnum):
    """The rules, by their names in tables."""

    SIX_ND = "6 N D at 40 % of the peak"
    ROOFLINE = "roofline of one GPU"
    ACCELERATE = "memory: accelerate estimate-memory"
    DEEPSPEED = "memory: DeepSpeed's ZeRO estimators"


def six_nd_tokens(device: Accelerator, num_parameters: int) -> float:
    """Return tokens per second at 6 FLOPs per parameter and token."""
    return _ASSUMED_MFU * device.peak_flops / (6 * num_parameters)


def roofline_tokens(device: Accelerator, workload: Workload) -> float:
    """Return tokens per second if each operation ran at peak FLOPs or full memory bandwidth."""
    seconds = sum(
        max(operation.flops / device.peak_flops, operation.num_bytes / device.memory_bandwidth)
        for operation in workload.operations
    )
    return workload.tokens / seconds


def memory_rule(
    num_parameters: int, largest_layer: int, configuration: Configuration
) -> Iterator[tuple[str, float]]:
    """Yield bytes per GPU according to estimators that ignore activations and gathered units.

    Args:
        num_parameters: parameters of the model.
        largest_layer: parameters of the largest module without submodules.
        configuration: how the model is trained.
    """
    yield Rule.ACCELERATE, accelerate_bytes(num_parameters, configuration.compute_dtype)
    ranks = configuration.data_parallel
    if configuration.strategy in _LOW_STAGES:
        yield Rule.DEEPSPEED, deepspeed_stage2_bytes(num_parameters, ranks)
    elif configuration.row.shards:
        ranks = configuration.shard_size
        yield Rule.DEEPSPEED, deepspeed_stage3_bytes(num_parameters, largest_layer, ranks)


def accelerate_bytes(num_parameters: int, dtype: torch.dtype) -> float:
    """Return what ``accelerate estimate-memory`` (1.15) prints as "Training using Adam".

    That is its largest part: in float32 the step, with parameters, gradients and two states; with
    mixed precision only the two states.
    """
    return (16.0 if dtype == torch.float32 else 8.0) * num_parameters


def deepspeed_stage2_bytes(num_parameters: int, ranks: int) -> float:
    """Return DeepSpeed's (0.17) ``estimate_zero2_model_states_mem_needs`` without offload."""
    return 2.0 * num_parameters + 18.0 * num_parameters / ranks


def deepspeed_stage3_bytes(num_parameters: int, largest_layer: int, ranks: int) -> float:
    """Return DeepSpeed's (0.17) ``estimate_zero3_model_states_mem_needs`` without offload."""
    return 4.0 * largest_layer + 18.0 * num_parameters / ranks
