"""Measures the traffic of a step with torch's dispatcher: bytes copied, bytes sent, collectives.

*Bytes copied* are bytes written by ops that move values between tensors without combining them:
the ops in `_COPIES`, and scalings into another tensor (``mul.out``, ``div.out``), which fill
gradient buckets. They are counted over a whole step (forward, backward, update). In-place
arithmetic, sums, zeros and copies inside Gloo's collectives are not counted.

*Bytes sent* are the minimum that a rank must send: with n ranks, (n - 1) times its shard for an
all-gather, (n - 1) / n of the input for a reduce-scatter, twice that for an all-reduce, (n - 1) / n
for a broadcast (the mean over ranks). Gloo may send more: its reduce-scatter is an all-reduce.
Bytes that a rank reads from the memory of another rank on its host count as sent by that rank.

*Collectives* are calls, without barriers. shardwise copies on its own threads, which are watched
too, and counts what it sends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise._private import TorchDispatchMode, pytree
from shardwise.comm.communicator import Collectives, communicator
from shardwise.comm.device import CommStream, ThreadStream
from shardwise.runtime.module import runtime_of_root

__all__ = ["Traffic", "watch_traffic"]

_COPIES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::clone",
    "aten::cat",
    "aten::stack",
    "aten::_chunk_cat",
    "aten::_foreach_copy_",
    "aten::_foreach_copy",
    "aten::split_with_sizes_copy",
    "aten::index_copy_",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
}
_SCALES_INTO = {"aten::mul", "aten::div"}  # with out=
_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Traffic:
    """The traffic of one step on one rank."""

    copied_bytes: int = 0
    sent_bytes: int = 0
    num_collectives: int = 0


@contextmanager
def watch_traffic(model: nn.Module) -> Iterator[Traffic]:
    """Yield a `Traffic` that contains the traffic of the block when the block ends."""
    traffic = Traffic()
    queues = _queues(model)
    before = [queue.sent for queue in queues]
    own, *others = [_Watch() for _ in range(1 + len(queues))]
    for queue, watch in zip(queues, others, strict=True):
        _run_on(queue.stream, watch.__enter__)
    with own:
        yield traffic
    for queue, watch in zip(queues, others, strict=True):
        _run_on(queue.stream, partial(watch.__exit__, None, None, None))
    traffic.copied_bytes = sum(watch.copied_bytes for watch in (own, *others))
    traffic.sent_bytes = round(sum(watch.sent_bytes for watch in (own, *others)))
    traffic.num_collectives = sum(watch.num_calls for watch in (own, *others))
    for queue, (calls, num_bytes) in zip(queues, before, strict=True):
        traffic.num_collectives += queue.sent[0] - calls
        traffic.sent_bytes += queue.sent[1] - num_bytes


class _Watch(TorchDispatchMode):
    """Counts the ops of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied_bytes = 0
        self.sent_bytes = 0.0
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        collective = name.removeprefix("c10d::")
        if name in _COPIES:
            self.copied_bytes += _written(name, args, kwargs or {}, result)
        elif name in _SCALES_INTO and kwargs and "out" in kwargs:
            self.copied_bytes += kwargs["out"].nbytes
        elif collective in _SENT and collective != name:
            factor, argument = _SENT[collective]
            self.num_calls += 1
            self.sent_bytes += factor * _share(args) * _bytes(args[argument])
        return result


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if name == "fsdp::all_gather_copy_in":  # returns the whole buffer, but fills one slot
        return _bytes(args[0])
    out = kwargs.get("out")
    if out is not None:
        return _bytes(out)
    return _bytes(args[0] if name == "aten::_foreach_copy_" else result)


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor))


def _share(args: tuple[Any, ...]) -> float:
    """Return (n - 1) / n for the n ranks of the group in the arguments of a c10d op."""
    groups = [arg for arg in args if _is_group(arg)]
    size: int = dist.ProcessGroup.unbox(groups[0]).size()
    return (size - 1) / size


def _is_group(arg: Any) -> bool:
    return type(arg).__name__ in {"ScriptObject", "ProcessGroup"} and "ProcessGroup" in str(arg)


# c10d op -> (factor, argument): sent bytes are factor * (n - 1) / n * bytes of the argument.
_RESULT, _INPUT = 0, 1
_SENT: dict[str, tuple[int, int]] = {
    "allreduce_": (2, _RESULT),
    "allreduce_coalesced_": (2, _RESULT),
    "allgather_": (1, _RESULT),
    "_allgather_base_": (1, _RESULT),
    "allgather_into_tensor_coalesced_": (1, _RESULT),
    "reduce_scatter_": (1, _INPUT),
    "_reduce_scatter_base_": (1, _INPUT),
    "reduce_scatter_tensor_coalesced_": (1, _INPUT),
    "broadcast_": (1, _RESULT),
    "reduce_": (1, _RESULT),
    "alltoall_base_": (1, _INPUT),
    "alltoall_": (1, _INPUT),
}


def _queues(model: nn.Module) -> list[Collectives]:
    if not isinstance(model, sw.FSDPModule):
        return []
    runtime = runtime_of_root(model)
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    return [q for q in (comm.gather, comm.reduce) if isinstance(q.stream, ThreadStream)]


def _run_on(stream: CommStream, job: Callable[[], object]) -> None:
    work = stream.submit(lambda: (job(), None)[1])
    assert work.wait(_WAIT_SECONDS), "a stream did not become idle"
    if work.error is not None:
        raise work.error
