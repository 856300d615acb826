"""How well a run uses its machine: MFU, and what the ranks measure of each step."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from shardwise.diagnose.record import SomeSteps
from shardwise.train.config import ModelConfig
from shardwise.transport.device import name_of, peak_memory_bytes, total_memory_bytes

__all__ = ["RankFigures", "StepsOfRun", "flops_per_token", "peak_flops", "waits_of"]

# Dense matrix products in 16 bits, in FLOP/s, from the vendors' data sheets, by a part of the
# device's name. The first one that it has counts.
_PEAKS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The FLOP/s of ``device`` for matrix products, if they are known; not those of a CPU.

    In float32 they depend on whether TF32 is allowed, so there are none.
    """
    if dtype == "float32":
        return None
    name = name_of(device)
    return next((peak for part, peak in _PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def flops_per_token(model: ModelConfig, num_parameters: int) -> int:
    """FLOPs that the model needs for a token in forward and backward, without recomputation.

    ``6 N + 12 layers * width * context``: 2 in forward and 4 in backward for each of N parameters,
    the tied embedding included as the head that it is, and for queries times keys and
    probabilities times values, as if attention were not causal (PaLM, arXiv 2204.02311, appendix
    B). MFU is that times tokens per second, divided by the peak of all devices.
    """
    return 6 * num_parameters + 12 * model.layers * model.width * model.context


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank has measured of a step."""

    exposed_seconds: float  # compute waited for communication; on a device, in the step before
    peak_memory_bytes: float
    free_memory_bytes: float  # above that peak; on the CPU, of the host now

    @classmethod
    def measure(cls, device: torch.device, exposed_seconds: float) -> "RankFigures":
        peak = peak_memory_bytes(device)
        total = total_memory_bytes(device)
        free = psutil.virtual_memory().available if total is None else total - peak
        return cls(exposed_seconds, peak, free)


def waits_of(ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The fields of `StepMetrics` about waits: a rank for which others wait waits least itself."""
    exposed = [one.exposed_seconds for one in ranks]
    return {
        "exposed_seconds": sum(exposed) / len(exposed),
        "slowest_rank": exposed.index(min(exposed)),
    }


@dataclass(frozen=True, slots=True)
class StepsOfRun(Container[int]):
    """Steps of a run in the numbers of the ledger, where each backward ends a step."""

    chosen: Literal["some"] | tuple[int, ...]  # by the number in the metrics
    first: int  # that this process trains
    num_passes: int  # in a step

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        number = step // self.num_passes
        if self.chosen == "some":
            return number in SomeSteps()
        return self.first + number in self.chosen
