"""Clients of a hub that are not replicas, and replicas that do not match."""

import asyncio
import json
import socket
import struct
import threading
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PeerLost, PlanError, StepError
from shardwise.outer import hub as hub_module, optimizer as optimizer_module
from shardwise.outer.serving import HubThread
from shardwise.tensor.sharding import local_of
from tests.models import Stack
from tests.outer.test_hub import DEADLINE, Replica, at_once, close, together

OUTER = sw.Outer(every=2, dtype="int8", deadline=DEADLINE)


def frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", len(header), len(body)) + header + body


GREETING = {"kind": "hello", "replica": 0, "rank": 0}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        struct.pack("<IQ", 1 << 31, 1 << 60),
        frame(b"\xff\xfe"),
        frame(b"[1, 2]"),
        frame(b"[" * 100_000),
        frame(b'{"kind": "unknown"}'),
        frame(json.dumps(GREETING).encode()),
        frame(json.dumps({**GREETING, "replica": "zero", "rounds": 7}).encode()),
        frame(b'{"kind": "delta", "fragment": 0}'),
    ],
    ids=["http", "sizes", "text", "list", "deep", "kind", "short", "types", "delta"],
)
def test_a_stranger_is_shown_out_and_replicas_go_on(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with HubThread() as hub:
        host, _, port = hub.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as stranger:
            stranger.sendall(sent)
            answer = b""
            try:
                while piece := stranger.recv(1 << 12):
                    answer += piece
            except ConnectionResetError:  # the hub closed before it had read everything
                pass
        assert "refused" in str(answer) or "is no rank of a replica" in caplog.text
        a = Replica(hub.address, 0, OUTER)
        a.train(2)
        assert a.outer.progress[0].round == 1
        assert list(hub.hub.replicas) == [0]
        close(a)


@pytest.mark.parametrize("iterations", range(6))  # of the loop before the hub ends
def test_a_hub_that_ends_finishes_the_connections_that_it_has_just_accepted(
    iterations: int, caplog: pytest.LogCaptureFixture
) -> None:
    hub = HubThread()
    host, _, port = hub.address.rpartition(":")
    loop, ended = hub._loop, threading.Event()

    def end_after(iterations: int) -> None:
        if iterations:
            loop.call_soon(end_after, iterations - 1)
        else:
            hub._task.cancel()
            ended.set()

    with socket.socket() as stranger:
        loop.call_soon_threadsafe(stranger.connect, (host, int(port)))
        loop.call_soon_threadsafe(end_after, iterations)
        assert ended.wait(DEADLINE)
        hub._thread.join(DEADLINE)
    assert loop.is_closed()
    assert not asyncio.all_tasks(loop)
    assert "asyncio" not in {record.name for record in caplog.records}


def test_two_replicas_with_one_number_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_TAKEN_SECONDS", 0.0)
    with HubThread() as hub:
        first, second = (Replica(hub.address, 0, OUTER) for _ in range(2))
        first.outer.join()
        with pytest.raises(PlanError, match=r"another process is replica 0, rank 0; give each"):
            second.outer.join()
        first.train(2)
        assert first.outer.progress[0].round == 1
        close(first, second)


def test_another_outer_optimizer_and_another_model_are_refused() -> None:
    slower = partial(torch.optim.SGD, lr=0.1)
    other_outer = sw.Outer(every=2, dtype="int8", deadline=DEADLINE, optimizer=slower)
    with HubThread() as hub:
        a, b = Replica(hub.address, 0, OUTER), Replica(hub.address, 1, other_outer)
        a.outer.join()
        with pytest.raises(PlanError, match=r"has outer optimizer='SGD\(.*lr=0.1"):
            b.outer.join()
        model = sw.fully_shard(Stack(2).double(), units=nn.Linear)
        optimizer = torch.optim.AdamW(model.parameters())
        c = sw.outer_optimizer(model, optimizer, OUTER, hub=hub.address, replica=2)
        with pytest.raises(PlanError, match=r"has digest of model and units=.* the same model"):
            c.join()
        c.remove()
        close(a, b)


def test_replicas_with_other_frozen_values_are_refused_and_one_that_unfreezes_is_told() -> None:
    class Tuned(Replica):
        """A replica whose first layer is frozen."""

        def __init__(self, hub: str, number: int, seed: int) -> None:
            torch.manual_seed(seed)
            self.number = number
            model = Stack(1).double()
            model.first.requires_grad_(False)
            self.model = sw.fully_shard(model, units=nn.Linear)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.outer = sw.outer_optimizer(
                self.model, self.optimizer, OUTER, hub=hub, replica=number, num_replicas=2
            )

    with HubThread() as hub:
        a, b, other = (Tuned(hub.address, n, seed) for n, seed in ((0, 3), (1, 3), (2, 9)))
        together(a, b, until=2)
        with pytest.raises(PlanError, match=r"replica 2 has checksum of frozen parameters="):
            other.outer.join()
        a.model.requires_grad_(True)
        with pytest.raises(PlanError, match=r"first.weight was frozen when sw.outer_optimizer"):
            a.train(1)
        close(a, b, other)


def test_replicas_whose_outer_optimizers_drift_apart_get_an_error() -> None:
    """One replica changes the learning rate of its outer optimizer."""
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, OUTER, num_replicas=2) for number in range(2))
        together(a, b, until=2)
        b.outer.param_groups[0]["lr"] = 0.1
        together(a, b, until=3)
        errors: list[BaseException] = []

        def on(one: Replica) -> None:
            try:
                one.train_until(8)
            except PlanError as error:
                errors.append(error)

        at_once(partial(on, a), partial(on, b))
        assert len(errors) == 1
        assert "other shared parameters than replica" in str(errors[0])
        assert "use the same outer optimizer and learning rates" in str(errors[0])
        close(a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_replica_whose_parameters_are_not_finite_leaves_the_others_theirs(value: float) -> None:
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, OUTER, num_replicas=2) for number in range(2))
        together(a, b, until=2)
        with torch.no_grad():
            local_of(b.model.first.weight)[0] = value
        with pytest.raises(StepError, match="weight of this replica is not finite after step 4"):
            b.train_until(4)
        a.train_until(6)
        assert a.outer.progress[0].round == 3
        assert all(one.isfinite().all() for one in a.shared)
        close(a, b)


def test_a_hub_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_PATIENCE_SECONDS", 0.2)
    with HubThread() as hub:
        address = hub.address
    a = Replica(address, 0, sw.Outer(every=2, dtype="int8", deadline=0.2))
    with pytest.raises(PeerLost, match=f"no hub at {address}: .* start the hub with `python -m"):
        a.outer.join()
    close(a)
