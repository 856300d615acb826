"""Measures how well a run uses its machine: MFU, and figures of each rank and step."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import nn

from shardwise.forecast.machines.hardware import accelerator_of_device
from shardwise.launch.world import World
from shardwise.local_devices import name_of, peak_memory_bytes, total_memory_bytes
from shardwise.recording.record import DefaultSteps
from shardwise.train.config import Config
from shardwise.train.source import Source

__all__ = [
    "RankFigures",
    "StepsOfRun",
    "flops_per_token",
    "peak_flops",
    "share_of_peak",
    "wait_metrics",
]


def share_of_peak(config: Config, world: World, model: nn.Module, source: Source) -> float | None:
    """The MFU of ``world`` with one token per second, if the peak of its devices is known.

    ``model`` is the whole one, before ranks divide it.
    """
    peak = peak_flops(world.device, config.precision.compute)
    if peak is None:
        return None
    flops = flops_per_token(
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        num_layers=source.num_layers,
        width=source.block_width,
        context=config.model.context,
    )
    return flops / (peak * world.size)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The peak FLOP/s of ``device`` for matrix products; None if it is not known, as on a CPU.

    In float32 the peak depends on whether TF32 is allowed, so the result is None.
    """
    if dtype == "float32":
        return None
    accelerator = accelerator_of_device(name_of(device))
    return None if accelerator is None else accelerator.peak_flops


def flops_per_token(
    num_parameters: int, num_trained: int, *, num_layers: int, width: int, context: int
) -> int:
    """FLOPs per token that the model needs in forward and backward, without recomputation.

    The formula is ``6 N + 12 layers * width * context``. Each of N parameters takes 2 FLOPs in
    forward and 4 in backward; a tied embedding counts once, as the head. The second term is for
    queries times keys and probabilities times values, as if attention were not causal (PaLM, arXiv
    2204.02311, appendix B). Parameters that are not trained take 2 FLOPs less in backward. MFU is
    this number times tokens per second, divided by the peak of all devices.
    """
    return 4 * num_parameters + 2 * num_trained + 12 * num_layers * width * context


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures that one rank measured in a step."""

    # Time compute waited for communication; on a device in the last step, or NaN if not timed.
    exposed_seconds: float
    peak_memory_bytes: float
    free_memory_bytes: float  # device memory beyond the peak; on the CPU, available host memory

    @classmethod
    def measure(cls, device: torch.device, exposed_seconds: float) -> "RankFigures":
        peak = peak_memory_bytes(device)
        total = total_memory_bytes(device)
        free = psutil.virtual_memory().available if total is None else total - peak
        return cls(exposed_seconds, peak, free)


def wait_metrics(ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The fields of `StepMetrics` about waiting. The slowest rank is the one that waits least."""
    exposed = [rank.exposed_seconds for rank in ranks]
    if any(map(math.isnan, exposed)):
        return {}
    return {
        "exposed_seconds": sum(exposed) / len(exposed),
        "slowest_rank": exposed.index(min(exposed)),
    }


@dataclass(frozen=True, slots=True)
class StepsOfRun(Container[int]):
    """The recorded steps of a run, as numbers of the ledger, where each backward ends a step."""

    chosen: Literal["some"] | tuple[int, ...]  # "some", or step numbers as in the metrics
    first: int  # first step that this process trains
    num_passes: int  # passes per step

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        number = step // self.num_passes
        if self.chosen == "some":
            return number in DefaultSteps()
        return self.first + number in self.chosen
