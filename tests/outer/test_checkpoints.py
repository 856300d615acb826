"""Checkpoints of replicas that synchronize through a hub."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.outer.serving import HubThread
from shardwise.tensor.sharding import local_of
from tests.outer.test_hub import DEADLINE, Replica, assert_equal_shared, close, together


def test_all_replicas_go_on_from_checkpoints_that_were_saved_during_a_round(tmp_path: Path) -> None:
    outer = sw.Outer(every=4, fragments=2, delay=2, dtype="int8", deadline=DEADLINE)

    def start(hub: HubThread) -> list[Replica]:
        return [Replica(hub.address, number, outer, num_replicas=2) for number in range(2)]

    with HubThread() as hub:
        replicas = start(hub)
        together(*replicas, until=3)
        for one in replicas:
            sw.save(tmp_path / str(one.number), **one.state)
        together(*replicas, until=8)
        close(*replicas)
    with HubThread() as hub:
        others = start(hub)
        for one in others:
            sw.load(tmp_path / str(one.number), **one.state)
        together(*others, until=8)
        close(*others)
    for one, other in zip(replicas, others, strict=True):
        assert all(map(torch.equal, one.shared, other.shared))
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(local_of(p), local_of(q)) for p, q in pairs)


def test_a_full_disk_of_one_replica_does_not_stop_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, write = tmp_path / "1" / "step-6", os.pwrite

    def write_unless_full(descriptor: int, content: Any, offset: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", write_unless_full)
    outer = sw.Outer(every=4, fragments=2, delay=2, dtype="int8", deadline=DEADLINE)
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
        for step in (3, 6):
            together(a, b, until=step)
            sw.save(tmp_path / "0" / f"step-{step}", **a.state)
            if step == 3:
                sw.save(tmp_path / "1" / "step-3", **b.state)
        bits = [local_of(p).detach().clone() for p in b.model.parameters()]
        with pytest.raises(sw.CheckpointError, match=r"1/step-6.*the disk is full"):
            sw.save(full, **b.state)
        assert all(map(torch.equal, bits, map(local_of, b.model.parameters())))
        later = sw.save(full, **b.state, wait=False)
        together(a, b, until=12)
        with pytest.raises(sw.CheckpointError, match="the disk is full"):
            later.wait()
        assert_equal_shared(a, b)
        assert {0, 1} == hub.hub.replicas.keys()
        close(a, b)
    assert sw.latest(tmp_path / "0") == tmp_path / "0" / "step-6"
    assert sw.latest(tmp_path / "1") == tmp_path / "1" / "step-3"
