"""What a step moves: bytes copied, collectives, bytes sent. Seen from where torch dispatches ops.

*Bytes copied* are the bytes written by ops that bring values from one tensor into another without
combining them: ``copy_``, ``_to_copy``, ``clone``, ``cat``, ``stack``, ``chunk_cat``, their foreach
and ``*_copy`` forms, FSDP's own (``fsdp::all_gather_copy_in`` and the like), and a scaling whose
result goes to another tensor (``mul.out``, ``div.out``: how gradients get into buckets). Counted
over a whole step (forward, backward, update), less what the same model copies without any engine.
Not counted: arithmetic in place, sums, zeros, and what Gloo copies inside its own collectives.

*Bytes sent* are what a rank has to send at least: with n ranks, (n - 1) times its shard for an
all-gather, (n - 1) / n of the input for a reduce-scatter, twice that for an all-reduce, (n - 1) / n
for a broadcast (the mean over ranks). Gloo itself may send more: its reduce-scatter is an
all-reduce. *Collectives* are calls. Barriers do not count. What is read from the memory of a rank
of the same host counts as sent by that one, and as a copy as little as what comes by a socket; so
does what it gathers into memory that both have in common.

shardwise copies on threads of its own: these are watched as well. It says itself what it sends.
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
from shardwise.runtime.module import runtime_of_root
from shardwise.transport.api import Collectives, CommStream
from shardwise.transport.communicator import communicator

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
    """Of one step on one rank."""

    copied_bytes: int = 0
    sent_bytes: int = 0
    num_collectives: int = 0


@contextmanager
def watch_traffic(model: nn.Module) -> Iterator[Traffic]:
    """Fill in what is yielded with what happens within, at its end."""
    traffic = Traffic()
    queues = _queues(model)
    streams = [queue.stream for queue in queues]
    before = [queue.sent for queue in queues]
    watches = [_Watch() for _ in range(1 + len(streams))]
    for stream, watch in zip(streams, watches[1:], strict=True):
        _run_on(stream, watch.__enter__)
    with watches[0]:
        yield traffic
    for stream, watch in zip(streams, watches[1:], strict=True):
        _run_on(stream, partial(watch.__exit__, None, None, None))
    traffic.copied_bytes = sum(watch.copied_bytes for watch in watches)
    traffic.sent_bytes = round(sum(watch.sent_bytes for watch in watches))
    traffic.num_collectives = sum(watch.num_calls for watch in watches)
    for queue, (calls, num_bytes) in zip(queues, before, strict=True):
        traffic.num_collectives += queue.sent[0] - calls
        traffic.sent_bytes += queue.sent[1] - num_bytes


@dataclass
class _Counts:
    copied_bytes: int = 0
    sent_bytes: float = 0.0
    num_calls: int = 0


class _Watch(TorchDispatchMode, _Counts):  # type: ignore[no-untyped-call]
    """Counts the ops of the thread that enters it."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        _Counts.__init__(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _COPIES:
            self.copied_bytes += _written(name, args, kwargs or {}, result)
        elif name in _SCALES_INTO and kwargs and "out" in kwargs:
            self.copied_bytes += kwargs["out"].nbytes
        elif name.startswith("c10d::"):
            self._note_collective(name.removeprefix("c10d::"), args)
        return result

    def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _SENT:
            self.num_calls += 1
            self.sent_bytes += _SENT[name](args)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that an op of `_COPIES` wrote."""
    if name == "fsdp::all_gather_copy_in":  # returns the whole buffer, of which it fills a slot
        return _bytes(args[0])
    out = kwargs.get("out")
    if out is not None:
        return _bytes(out)
    return _bytes(args[0] if name == "aten::_foreach_copy_" else result)


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor))


# -- what a rank sends, by the arguments of c10d's ops -------------------------------------------


def _share(args: tuple[Any, ...]) -> float:
    """(n - 1) / n of the group's n ranks."""
    groups = [arg for arg in args if _is_group(arg)]
    size: int = dist.ProcessGroup.unbox(groups[0]).size()
    return (size - 1) / size


def _is_group(arg: Any) -> bool:
    return type(arg).__name__ in {"ScriptObject", "ProcessGroup"} and "ProcessGroup" in str(arg)


def _of_result(args: tuple[Any, ...]) -> float:
    return _share(args) * _bytes(args[0])


def _of_input(args: tuple[Any, ...]) -> float:
    return _share(args) * _bytes(args[1])


def _twice(args: tuple[Any, ...]) -> float:
    return 2 * _of_result(args)


_SENT: dict[str, Callable[[tuple[Any, ...]], float]] = {
    "allreduce_": _twice,
    "allreduce_coalesced_": _twice,
    "allgather_": _of_result,
    "_allgather_base_": _of_result,
    "allgather_into_tensor_coalesced_": _of_result,
    "reduce_scatter_": _of_input,
    "_reduce_scatter_base_": _of_input,
    "reduce_scatter_tensor_coalesced_": _of_input,
    "broadcast_": _of_result,
    "reduce_": _of_result,
    "alltoall_base_": _of_input,
    "alltoall_": _of_input,
}


# -- the threads of shardwise --------------------------------------------------------------------


def _queues(model: nn.Module) -> list[Collectives]:
    if not isinstance(model, sw.FSDPModule):
        return []
    runtime = runtime_of_root(model)
    links = communicator(runtime.axis.world, runtime.pools.device)
    return [links.gather, links.reduce]


def _run_on(stream: CommStream, job: Callable[[], object]) -> None:
    work = stream.submit(lambda: (job(), None)[1])
    assert work.wait(_WAIT_SECONDS), "a stream did not become idle"
    if work.error is not None:
        raise work.error
