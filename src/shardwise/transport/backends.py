"""What each backend of torch.distributed can do. docs/streams.md has the table in words.

A backend that is not listed can do the least: it is given nothing in place, and asked for sums
only. Whether one gives memory of its own is asked of the backend, as it depends on the version of
its library (`registered_memory`).
"""

from dataclasses import dataclass

import torch

__all__ = ["Capabilities", "capabilities_of"]

# Complex numbers go as real ones, and all others as bytes.
_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.complex128, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    }
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend can do."""

    is_stream_ordered: bool = False  # streams of the device order its works: the host never waits
    in_place: bool = False  # all-gather and reduce-scatter, at the slot of the rank
    averages: bool = False  # ReduceOp.AVG, without a separate pass
    scales: bool = False  # ReduceOp.PREMUL_SUM
    dtypes: frozenset[torch.dtype] = _DTYPES  # that it gathers


# Of xccl, oneCCL averages since 2021.15, and torch cannot be asked which one it was built with.
_BACKENDS = {
    "nccl": Capabilities(is_stream_ordered=True, in_place=True, averages=True, scales=True),
    "xccl": Capabilities(is_stream_ordered=True, in_place=True),
    "hccl": Capabilities(is_stream_ordered=True, in_place=True),
    "gloo": Capabilities(in_place=True),
    "fake": Capabilities(in_place=True, averages=True, scales=True),  # it does nothing
}


def capabilities_of(backend: str | None) -> Capabilities:
    """What ``backend`` can do; of one rank alone, None, it does not matter."""
    return _BACKENDS.get(backend or "", Capabilities())
