"""Stopped ranks are distinguished from busy ones."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.comm.communicator import communicator
from shardwise.errors import PeerLost, PeerSilent
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import resolve_mesh
from shardwise.watch.monitor import Monitor, Patience
from shardwise.watch.status import Report
from shardwise.watch.store import BoundedStore
from tests.ranks import on_ranks
from tests.waiting import eventually
from tests.watching import is_silent, quick_to_lose, watch_with


def test_a_rank_whose_counter_stays_the_same_is_silent() -> None:
    """Silence is counted in heartbeats of the rank that watches, not measured by the clock."""
    store, quiet = BoundedStore(HashStore(), 20.0), Patience(beat_seconds=1000.0)
    seconds = int(quiet.silent_seconds / Patience().beat_seconds)
    patience = replace(quiet, silent_seconds=seconds * quiet.beat_seconds)
    own, other = (Monitor(store, "group", rank, 3, patience) for rank in range(2))

    def beat(monitor: Monitor, count: int) -> None:
        monitor.beat(Report(0, 0, count, "forward", (), count=count))
        own.check_heartbeats()

    for count in range(10):  # rank 2, which has not started, is not silent
        beat(other, count)
        beat(own, count)
    for count in range(10, 10 + seconds - 1):
        beat(own, count)
    with pytest.raises(PeerSilent, match=r"^rank 0 lost rank 1: its process gave no sign of life"):
        beat(own, 0)
    beat(other, 10)  # it was only slow
    beat(own, 0)
    del other  # its thread publishes that it has ended
    assert eventually(lambda: b"no uncaught exception" in store.peek("shardwise/group/heartbeat/1"))
    for count in range(seconds):
        beat(own, count)
    with pytest.raises(PeerLost, match=r"^rank 1 ended after step 0 .*: .* it had fewer batch"):
        beat(own, 0)


@on_ranks(2)
def test_a_rank_that_was_stopped_is_lost_until_it_comes_back(tmp_path: Path) -> None:
    rank, over = dist.get_rank(), tmp_path / "over"
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    world = resolve_mesh(mesh, PRESETS["fsdp"]).world
    patience = Patience(poll_seconds=0.05, beat_seconds=0.25, silent_seconds=60.0)
    with watch_with(patience):
        comm = communicator(world, torch.device("cpu"))
    model = sw.fully_shard(nn.Linear(8, 8), mesh=mesh)
    expected = model(torch.ones(1, 8))
    dist.barrier()  # otherwise the other rank would be stopped in that call, which would raise
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with quick_to_lose(comm):
                lost = _lost(model)
                with pytest.raises(PeerSilent, match="no sign of life"):
                    comm.watch.recover()  # checks the other rank while it waits
        finally:
            os.kill(pids[1], signal.SIGCONT)
            over.touch()
        assert eventually(lambda: not is_silent(comm))
    else:
        while not over.exists():  # stopped and continued here
            time.sleep(0.01)
        lost = _lost(model)
    assert re.match(r"rank 0 lost rank 1: its process gave no sign of life for \d+ s", lost)
    assert torch.equal(model(torch.ones(1, 8)), expected), "the rank has recovered"
    assert comm.watch.epoch == 1


def _lost(model: nn.Module) -> str:
    """The stopped rank receives what the other one sent, and raises in the next call."""
    with pytest.raises(PeerSilent) as lost:
        _run_twice(model)
    return str(lost.value)


def _run_twice(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(1, 8))
