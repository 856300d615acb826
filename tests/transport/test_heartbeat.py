"""Stopped ranks are distinguished from busy ones."""

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.errors import PeerSilent
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import resolve_mesh
from shardwise.transport.communicator import communicator
from shardwise.transport.health import monitor
from shardwise.transport.health.monitor import Monitor, Patience
from tests.ranks import on_ranks
from tests.waiting import eventually


def test_a_rank_whose_counter_stays_the_same_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now))
    store, counter = HashStore(), "shardwise/group/heartbeat/1"
    own = Monitor(store, "group", 0, 3, Patience())
    other = Monitor(store, "group", 1, 3, Patience(beat_seconds=0.02))
    for _ in range(10):  # rank 1 beats, and rank 2 has not started
        seen = store.get(counter)
        assert eventually(lambda seen=seen: store.get(counter) != seen)  # type: ignore[misc]
        now += 2.0
        own.watch()
    del other
    own.watch()
    for _ in range(5):
        now += 2.0
        own.watch()
    own.check_heartbeats()
    now += 2.0
    own.watch()
    with pytest.raises(PeerSilent, match=r"^rank 0 lost rank 1: its process gave no sign of life"):
        own.check_heartbeats()


def test_heartbeats_of_an_earlier_wait_are_ignored() -> None:
    store = HashStore()
    own = Monitor(store, "group", 0, 2, Patience(beat_seconds=0.02, silent_seconds=0.01))
    store.set("shardwise/group/heartbeat/1", "7")
    own.watch()
    time.sleep(0.06)  # as if the whole job had been stopped and continued
    own.watch()
    own.check_heartbeats()


@on_ranks(2)
def test_a_rank_that_was_stopped_is_lost_until_it_comes_back(tmp_path: Path) -> None:
    rank, over = dist.get_rank(), tmp_path / "over"
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    world = resolve_mesh(mesh, PRESETS["fsdp"]).world
    patience = Patience(poll_seconds=0.05, beat_seconds=0.25, silent_seconds=2.0)
    comm = communicator(world, torch.device("cpu"), patience)
    model = sw.fully_shard(nn.Linear(8, 8), mesh=mesh)
    expected = model(torch.ones(1, 8))
    dist.barrier()  # otherwise the other rank would be stopped in that call, which would raise
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            lost = _lost(model)
            with pytest.raises(PeerSilent, match="no sign of life"):
                comm.recover()  # checks the other rank while it waits
        finally:
            os.kill(pids[1], signal.SIGCONT)
            over.touch()
    else:
        while not over.exists():  # stopped and continued here
            time.sleep(0.01)
        lost = _lost(model)
    assert re.match(r"rank 0 lost rank 1: its process gave no sign of life for \d+ s", lost)
    assert torch.equal(model(torch.ones(1, 8)), expected), "the rank has recovered"
    assert comm.epoch == 1


def _lost(model: nn.Module) -> str:
    """The stopped rank receives what the other one sent, and raises in the next call."""
    with pytest.raises(PeerSilent) as lost:
        _run_twice(model)
    return str(lost.value)


def _run_twice(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(1, 8))
