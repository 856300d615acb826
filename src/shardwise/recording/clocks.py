"""The offset between a rank's clock and the clock of rank 0."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.runtime.engine import Runtime
from shardwise.tensor.reductions import across

__all__ = ["ClockOffset", "measure_clock_offset", "offset_from"]

_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's."""

    seconds: float
    error_seconds: float  # upper bound


def measure_clock_offset(runtime: Runtime) -> ClockOffset:
    """Compare the clocks of a model's ranks; all ranks must call this."""
    mesh, device = runtime.mesh, runtime.pools.device
    rank, rounds, ended = mesh.world.index, [], 0.0
    for _ in range(_ROUNDS + 1):  # each round also exchanges the end of the previous one
        times = torch.tensor([time.perf_counter(), ended], dtype=torch.float64, device="cpu")
        by_rank = across(times.to(device).unbind(), mesh, mesh.world).tolist()
        ended = time.perf_counter()
        rounds.append((by_rank[0], by_rank[rank]))
    began = [(first[0], own[0]) for first, own in rounds[:-1]]
    ends = [(first[1], own[1]) for first, own in rounds[1:]]
    return offset_from(began, ends) if rank else ClockOffset(0.0, 0.0)


def offset_from(
    began: Sequence[tuple[float, float]], ended: Sequence[tuple[float, float]]
) -> ClockOffset:
    """Compute the offset from the times of several exchanges on rank 0 and on another rank.

    An exchange ends on each rank after it began on the other, so every exchange bounds the offset
    from both sides. The shortest exchanges give the tightest bounds.
    """
    rounds = list(zip(began, ended, strict=True))
    least = max((first - own_end for (first, _), (_, own_end) in rounds), default=-math.inf)
    most = min((first_end - own for (_, own), (first_end, _) in rounds), default=math.inf)
    return ClockOffset((least + most) / 2, max(0.0, most - least) / 2)
