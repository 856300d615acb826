"""An error of this rank in an exchange is raised as itself; the other ranks are not lost by it."""

import ctypes
import errno
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.features import host_collectives
from shardwise.host import peers, point_to_point, shared_memory
from shardwise.runtime import scheduler, unit
from shardwise.watch import monitor
from shardwise.watch.monitor import Patience
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_equal_steps,
    comm_of,
    own_part,
    rank,
    sharded_pair,
    world_size,
)
from tests.watching import watch_of

WIDTH = 128  # the tensors of a layer are read from memory, and its bias is sent inline

# What fails on a rank, and with which error.
FAULTS: dict[str, tuple[Any, str, Exception]] = {
    "read": (peers.Offer, "read", OSError(errno.EFAULT, "Bad address")),
    "no memory": (peers.Offer, "read", OSError(errno.ENOMEM, "Cannot allocate memory")),
    "inline": (ctypes, "memmove", RuntimeError("memmove")),
    "sum": (host_collectives, "copy_scaled_", RuntimeError("can't allocate memory")),
    "fill": (unit, "copy_", ValueError("a shard that cannot be read")),
    "move": (shared_memory.SharedMemory, "open", OSError(errno.EMFILE, "too many")),
    "launch": (host_collectives, "check_memory", RuntimeError("no storage")),
    "launch a sum": (point_to_point, "check_memory", RuntimeError("no storage")),
}


@pytest.mark.parametrize(
    ("fault", "strategy", "failing"),
    covered_first(itertools.product(FAULTS, ("fsdp", "ddp", "zero1"), ((0,), (1,), (0, 1)))),
    ids=str,
)
@on_ranks(2)
def test_a_local_error_is_raised_as_itself(
    fault: str, strategy: str, failing: tuple[int, ...]
) -> None:
    reference, model = _make(strategy)
    _check_step(model, reference)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.02)
    number = 0
    while _fails(fault, number, failing, model):  # at the first such call, at the second, ...
        _check_step(model, reference)
        number += 1 + number // 2
    monkeypatch.undo()
    _check_step(model, reference)


@on_ranks(2)
def test_a_message_that_cannot_be_sent_is_a_lost_connection_on_both_sides() -> None:
    reference, model = _make("fsdp")
    _check_step(model, reference)
    queue = comm_of(model).gather
    assert isinstance(queue, host_collectives.HostCollectives)
    transport = queue.point_to_point
    peer = transport.host.peers[1 - rank()]
    failing = mock.Mock(wraps=peer.connection)
    failing.sendall.side_effect = failing.sendmsg.side_effect = OSError(errno.ENOBUFS, "no buffers")
    if rank() == 0:
        peer.connection = failing
    # On a busy machine the reason may take long to come from the other side.
    with mock.patch.object(monitor, "_REASON_SECONDS", 60.0), pytest.raises(sw.PeerLost) as caught:
        model(_batch()).mean().backward()
    # The second rank, whose connection was closed, lets the first one say why.
    text = "^rank 0 lost rank 1: a message could not be sent to it: .*no buffers"
    assert re.search(text, str(caught.value))


def test_errors_of_a_connection_are_lost_ranks_and_no_others() -> None:
    transport = mock.Mock(spec=point_to_point.PointToPoint, own_rank=0)
    transport._lost.side_effect = lambda *args: point_to_point.PointToPoint._lost(transport, *args)
    gone = [
        ConnectionResetError(errno.ECONNRESET, "it closed the connection"),
        BrokenPipeError(errno.EPIPE, "pipe"),
        EOFError("end"),
        TimeoutError("nothing"),
        ProcessLookupError(errno.ESRCH, "No such process"),
    ]
    for error in [*gone, OSError(errno.EFAULT, "x"), RuntimeError("x"), MemoryError("x")]:
        action = mock.Mock(side_effect=[error, 7])
        expected = point_to_point.RankLostError if error in gone else type(error)
        with pytest.raises(expected):
            point_to_point.PointToPoint._for_each(transport, [1, 2], action)
        assert action.call_count == 2, "the other ranks do not wait for this one"


def _make(strategy: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    reference, model = sharded_pair(layers, units=nn.Linear, strategy=strategy, mesh=mesh)
    watch_of(comm_of(model)).patience = Patience(poll_seconds=0.02)
    return reference, model


def _batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def _check_step(model: Any, reference: Any) -> None:
    assert_equal_steps(model, reference, 1, batch=_batch, zeroes=True)


def _fails(fault: str, number: int, failing: tuple[int, ...], model: Any) -> bool:
    """Run a step in which call ``number`` fails on some ranks; whether there was such a call."""
    owner, name, error = FAULTS[fault]
    raised: Exception | None = None
    with _failing(owner, name, number, error if rank() in failing else None):
        try:
            _step(model)
        except (sw.StepError, type(error)) as caught:
            raised = caught.with_traceback(None)  # whose frames would keep the backward alive
    outcomes = [(False, False)] * world_size()
    dist.all_gather_object(outcomes, (raised is error, raised is None))
    if not any(is_own for is_own, _ in outcomes):
        assert all(passed for _, passed in outcomes)
        return False
    if raised is error:
        assert "raised in step" in "".join(error.__notes__)
        del error.__notes__
        return True
    if raised is None:  # it waited for nothing more in that step
        with pytest.raises(sw.PeerAborted) as late:
            _step(model)
        raised = late.value
    assert isinstance(raised, sw.PeerAborted)
    assert f"{type(error).__name__}: {error}" in str(raised)
    return True


def _step(model: Any) -> None:
    model(own_part(_batch())).square().mean().backward()


@contextmanager
def _failing(owner: Any, name: str, number: int, error: Exception | None) -> Iterator[None]:
    """Raise ``error`` at call ``number`` of a function."""
    original, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if error is not None and next(calls) == number:
            raise error
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield
