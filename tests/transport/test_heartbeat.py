"""A rank that is stopped is told from one that is busy."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.transport.health import heartbeat as pulse
from shardwise.transport.health.heartbeat import Pulse
from tests.ranks import run_on


def test_a_counter_that_stays_is_a_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.05)
    store = HashStore()
    own, _other = Pulse(store, "group", 0, 3), Pulse(store, "group", 1, 3)
    own.check(0.0)
    time.sleep(0.09)
    own.check(0.0)  # it beats, and the third rank has not come so far
    del _other
    own.check(10.0)
    time.sleep(0.05)
    with pytest.raises(sw.PeerLost, match=r"rank 0 lost rank 1: .* no sign of life"):
        own.check(0.04)


def test_a_wait_that_is_long_ago_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.02)
    store = HashStore()
    own = Pulse(store, "group", 0, 2)
    store.set("shardwise/group/pulse/1", "7")
    own.check(0.01)
    time.sleep(0.06)  # a job that was stopped as a whole and goes on is not taken for dead
    own.check(0.01)


def test_who_waits_for_a_rank_that_was_stopped_is_told(tmp_path: Path) -> None:
    both = run_on(2, _wait_for_a_stopped_rank, tmp_path / "over", deadline=60.0)
    assert both[0].startswith("rank 0 lost rank 1: its process gave no sign of life for 3 s")
    assert both[1] == both[0]


def _wait_for_a_stopped_rank(over: Path) -> str:
    rank = dist.get_rank()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group([0, 1])  # which the test leaves in ruins
    model = sw.fully_shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(1, 8))
    dist.barrier()  # or the other one is stopped in that call, which raises then
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            return _lost(model, patience_seconds=3.0)
        finally:
            os.kill(pids[1], signal.SIGCONT)
            over.touch()
    while not over.exists():  # it is stopped here, and goes on
        time.sleep(0.01)
    return _lost(model, patience_seconds=pulse.STOPPED_SECONDS)


def _lost(model: nn.Module, patience_seconds: float) -> str:
    usual, pulse.STOPPED_SECONDS = pulse.STOPPED_SECONDS, patience_seconds
    try:
        with pytest.raises(sw.PeerLost) as lost:
            _twice(model)
        return str(lost.value)
    finally:
        pulse.STOPPED_SECONDS = usual


def _twice(model: nn.Module) -> None:
    """The rank that was stopped finds what the other had sent, and then that it is alone."""
    for _ in range(2):
        model(torch.ones(1, 8))
