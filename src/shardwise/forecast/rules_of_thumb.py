"""What people compute on the back of an envelope, as something to compare a forecast with."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.hardware import Accelerator
from shardwise.forecast.work import Workload

__all__ = ["RULES", "memory_rule", "roofline_tokens", "six_nd_tokens"]

_ASSUMED_MFU = 0.4
_LOW_STAGES = ("zero1", "zero2")


@dataclass(frozen=True, slots=True)
class _Rules:
    six_nd: str = "6 N D at 40 % of the peak"
    roofline: str = "roofline of one GPU"
    accelerate: str = "memory: accelerate estimate-memory"
    deepspeed: str = "memory: DeepSpeed's ZeRO estimators"

    def all(self) -> tuple[str, ...]:
        return astuple(self)


RULES = _Rules()


def six_nd_tokens(device: Accelerator, num_parameters: int) -> float:
    """Tokens per second at 6 FLOPs for each parameter and token."""
    return _ASSUMED_MFU * device.peak_flops / (6 * num_parameters)


def roofline_tokens(device: Accelerator, workload: Workload) -> float:
    """Tokens per second if each operation ran at the peak, or at the bandwidth of the memory."""
    seconds = sum(
        max(operation.flops / device.peak_flops, operation.num_bytes / device.memory_bandwidth)
        for segment in workload.segments
        for operation in segment.operations
    )
    return workload.tokens / seconds


def memory_rule(num_parameters: int, configuration: Configuration) -> Iterator[tuple[str, float]]:
    """Bytes of a GPU by estimators that know neither activations nor gathered units.

    - accelerate: parameters, gradients and Adam's two states in float32, not sharded.
    - DeepSpeed: 18 bytes a parameter over all ranks for stage 3; 4 on each rank and 16 over all
      ranks for stages 1 and 2 (``estimate_zero*_model_states_mem_needs``; the largest layer of
      stage 3, which it adds, is left out).
    """
    yield RULES.accelerate, 16.0 * num_parameters
    ranks = configuration.data_parallel
    if configuration.strategy in _LOW_STAGES:
        yield RULES.deepspeed, 4.0 * num_parameters + 16.0 * num_parameters / ranks
    elif configuration.row.shards:
        yield RULES.deepspeed, 18.0 * num_parameters / configuration.shard_size
