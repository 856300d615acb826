"""What each backend of torch.distributed supports. docs/streams.md has the same table.

For a backend that is not listed, nothing is assumed: no operation is in place, and only sums are
used. Whether a backend can allocate memory depends on the version of its library, so the backend
itself is asked (`features.collective_memory`).
"""

from dataclasses import dataclass

__all__ = ["Capabilities", "capabilities_of"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend supports."""

    is_stream_ordered: bool = False  # device streams order its collectives: the host never waits
    in_place: bool = False  # all-gather and reduce-scatter, at the slot of the rank
    averages: bool = False  # ReduceOp.AVG, without a separate pass
    scales: bool = False  # ReduceOp.PREMUL_SUM


# xccl: oneCCL averages since 2021.15, but torch does not tell which version it was built with.
_BACKENDS = {
    "nccl": Capabilities(is_stream_ordered=True, in_place=True, averages=True, scales=True),
    "xccl": Capabilities(is_stream_ordered=True, in_place=True),
    "hccl": Capabilities(is_stream_ordered=True, in_place=True),
    "gloo": Capabilities(in_place=True),
    "hostccl": Capabilities(in_place=True),  # of `shardwise.hostccl`
    "fake": Capabilities(in_place=True, averages=True, scales=True),  # does nothing
}


def capabilities_of(backend: str | None) -> Capabilities:
    """Return what ``backend`` supports; None, the backend of a single rank, supports nothing."""
    return _BACKENDS.get(backend or "", Capabilities())
