"""The memory that a step allocates, measured and forecast."""

from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from shardwise.forecast.memory.step import Certificate


def peak_of(profiled: Any) -> int:
    """Return the peak of allocated bytes, relative to the beginning of the profile."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def measured_peak(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> int:
    """Return the bytes that the third step allocates.

    Shards, states and gathered units keep their memory from step to step.
    """

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with profile(profile_memory=True) as profiled:
        step()
    return peak_of(profiled)


def forecast_peak(certificate: Certificate) -> int:
    """Return the bytes that `measured_peak` should find."""
    return max(
        moment.activations + moment.communication + moment.gradients + moment.temporaries
        for moment in certificate.timeline
    )
