"""The memory that PyTorch allocates in a profile."""

from typing import Any


def peak_of(profiled: Any) -> int:
    """Return the peak of allocated bytes, relative to the beginning of the profile."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak
