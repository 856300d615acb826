"""Replicas that synchronize through a hub: late, lost and returning replicas."""

import contextlib
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import PeerLost, PlanError
from shardwise.outer.exchange import Decision, Progress
from shardwise.outer.hub import Hub
from shardwise.outer.link import HubExchange
from shardwise.outer.members import Role
from shardwise.outer.serving import HubThread
from shardwise.tensor.sharding import local_of
from tests.models import Block, Stack
from tests.outer.test_group import replica_of, shared_of, train, two_replicas
from tests.ranks import on_ranks
from tests.waiting import eventually

DEADLINE = 60.0  # seconds; for rounds for which no replica is late
STATE_BYTES = 1 << 23  # more than the connections buffer


class Replica:
    """A replica with one rank, whose steps a thread runs."""

    def __init__(self, hub: str, number: int, outer: sw.Outer, **options: Any) -> None:
        torch.manual_seed(options.pop("seed", 3))
        self.number = number
        self.model = sw.fully_shard(Stack(1).double(), units=nn.Linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.outer = sw.outer_optimizer(
            self.model, self.optimizer, outer, hub=hub, replica=number, **options
        )

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            train(self.model, self.optimizer, self.number, range(self.outer.local_steps + 1)[-1:])

    def train_until(self, step: int) -> None:
        while self.outer.local_steps < step:
            self.train(1)

    @property
    def state(self) -> dict[str, Any]:
        """The objects to save in a checkpoint."""
        return {"model": self.model, "optimizer": self.optimizer, "outer": self.outer}

    @property
    def shared(self) -> list[Tensor]:
        return [local_of(state["anchor"]) for state in self.outer.state.values()]


def at_once(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def together(*replicas: Replica, until: int) -> None:
    """Train ``replicas`` concurrently up to step ``until``."""
    at_once(*(partial(one.train_until, until) for one in replicas))


def assert_equal_shared(*replicas: Replica) -> None:
    first, *others = replicas
    for other in others:
        assert first.outer.progress == other.outer.progress
        assert all(map(torch.equal, first.shared, other.shared))


def close(*replicas: Replica) -> None:
    for one in replicas:
        one.outer.remove()


@on_ranks(4)
def test_a_hub_gives_the_numbers_of_a_process_group() -> None:
    mesh = two_replicas()
    replica = mesh.get_local_rank("replicate")
    outer = sw.Outer(every=4, fragments=2, delay=1, mixing=0.25, dtype="float64")
    model, optimizer, handle = replica_of(outer, mesh)
    hub = HubThread() if dist.get_rank() == 0 else None
    address = [hub.address if hub else ""]
    dist.broadcast_object_list(address)
    torch.manual_seed(3)
    other = sw.fully_shard(Stack().double(), mesh=mesh["shard"], units=Block)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
    other_handle = sw.outer_optimizer(
        other, other_optimizer, outer, hub=address[0], replica=replica, num_replicas=2
    )
    for step in range(9):
        train(model, optimizer, replica, range(step, step + 1))
        before = other_handle.exchange.sent_bytes
        train(other, other_optimizer, replica, range(step, step + 1))
        sent = other_handle.exchange.sent_bytes - before
        assert sent == other_handle.planned_bytes(step + 1) == handle.planned_bytes(step + 1)
    for pair in zip(shared_of(handle), shared_of(other_handle), strict=True):
        assert torch.equal(*pair)
    dist.barrier()
    other_handle.remove()
    if hub is not None:
        hub.stop()


@on_ranks(2)
def test_no_rank_sends_while_another_one_of_its_replica_is_cut_off() -> None:
    """Otherwise it would wait for a decision that needs the other rank's difference."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hub = HubThread() if dist.get_rank() == 0 else None
    address = [hub.address if hub else ""]
    dist.broadcast_object_list(address)
    torch.manual_seed(3)
    model = sw.fully_shard(Stack().double(), mesh=mesh["shard"], units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    outer = sw.Outer(every=1, dtype="float64", deadline=DEADLINE)
    handle = sw.outer_optimizer(model, optimizer, outer, hub=address[0])
    handle.join()
    rounds = []
    for is_cut_off in (False, True, False):
        if dist.get_rank() == 1:
            handle.exchange.is_member = not is_cut_off
        train(model, optimizer, 0, range(1))
        rounds.append(handle.progress[0].round)
    assert rounds == [1, 1, 2]
    assert handle.exchange.sent_bytes == 2 * handle.planned_bytes(1)
    dist.barrier()
    handle.remove()
    if hub is not None:
        hub.stop()


def test_a_replica_that_ends_does_not_stop_the_others_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outer = sw.Outer(every=4, fragments=2, dtype="float32", deadline=DEADLINE)
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
        together(a, b, until=6)
        assert_equal_shared(a, b)
        close(b)
        assert eventually(lambda: 1 not in hub.hub.replicas)
        a.train(6)
        assert [one.round for one in a.outer.progress] == [3, 3]
        assert "replica 1 is gone after step 6, in rounds 2, 1 of fragments 0 to 1" in caplog.text
        assert "round 1 of fragment 1 went on without replica 1, which is gone" in caplog.text
        back = Replica(hub.address, 1, outer, num_replicas=2, seed=9)
        has_joined, target = threading.Event(), Future[int]()

        def come_back() -> None:
            assert back.outer.join() >= 13
            has_joined.set()
            while not target.done():  # the other replica waits for it in a round before that
                back.train(1)
            back.train_until(target.result())

        def go_on() -> None:
            while not has_joined.is_set():
                a.train(1)
            # Otherwise the hub would go on without it, and it would skip steps.
            assert eventually(lambda: hub.hub.replicas[1].role is Role.MEMBER)
            target.set_result(a.outer.local_steps + 8)
            a.train_until(target.result())

        at_once(come_back, go_on)
        assert_equal_shared(a, back)
        # Its inner optimizer has the states of the other replica.
        states = zip(a.optimizer.state.values(), back.optimizer.state.values(), strict=True)
        assert all(one.keys() == other.keys() for one, other in states)
        close(a, back)


def test_a_late_replica_is_named_and_what_it_did_counts_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outer = sw.Outer(
        every=2, dtype="float64", deadline=2.0, optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
        at_once(a.outer.join, b.outer.join)
        b.train(1)
        assert eventually(lambda: hub.hub.replicas[1].step == 1)
        a.train(2)  # does not wait for b
        assert "replica 1 (rank 0, after step 1) is late" in caplog.text
        own = [local_of(p).detach().clone() for p in b.model.parameters()]
        shift = [new - old for new, old in zip(a.shared, b.shared, strict=True)]
        assert eventually(lambda: b.outer.exchange.group_step == 2)
        b.outer._synchronize(2)  # as after a step that changed nothing
        moved = [local_of(p).detach() for p in b.model.parameters()]
        for now, before, by in zip(moved, own, shift, strict=True):
            torch.testing.assert_close(now, before + by, rtol=1e-12, atol=1e-12)
        assert (b.outer.progress[0].round, b.outer.local_steps) == (1, 2)
        assert_equal_shared(a, b)
        close(a, b)


def test_replicas_train_on_without_a_hub_and_meet_again_at_the_next() -> None:
    outer = sw.Outer(every=2, dtype="int4", deadline=DEADLINE)
    hub = HubThread()
    a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
    together(a, b, until=4)
    hub.stop()
    assert eventually(lambda: not (a.outer.exchange.is_member or b.outer.exchange.is_member))
    a.train(3)
    b.train(3)
    rounds = a.outer.progress[0].round
    assert rounds == b.outer.progress[0].round == 2
    host, _, port = hub.address.rpartition(":")
    with HubThread(host, int(port)):
        assert eventually(lambda: a.outer.exchange.is_member and b.outer.exchange.is_member)
        together(a, b, until=10)
        assert a.outer.progress[0].round > rounds
        assert_equal_shared(a, b)
        close(a, b)


def test_a_late_replica_keeps_the_first_rounds_of_fragments_apart() -> None:
    """Both begin with the same digest."""
    outer = sw.Outer(every=2, fragments=2, dtype="float64", deadline=1.0)
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
        at_once(a.outer.join, b.outer.join)
        a.train(2)  # does not wait for b; synchronizes both fragments
        assert eventually(lambda: b.outer.exchange.group_step == 2)
        b.train(1)
        assert b.outer.progress[0] == a.outer.progress[0]
        for one, other in zip(
            *(each.outer.fragments[0].parameters for each in (a, b)), strict=True
        ):
            states = a.outer.state[one], b.outer.state[other]
            assert torch.equal(*(local_of(state["anchor"]) for state in states))
        close(a, b)


def test_replicas_that_come_back_at_different_steps_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is before the step of the first fragment, the other after it."""
    expired: list[int] = []
    monkeypatch.setattr(Hub, "_expire", lambda _, fragment: expired.append(fragment))
    outer = sw.Outer(every=4, fragments=2, dtype="float32", deadline=DEADLINE)
    with HubThread() as hub:
        a, b = (Replica(hub.address, number, outer, num_replicas=2) for number in range(2))
        together(a, b, until=4)
    assert eventually(lambda: not (a.outer.exchange.is_member or b.outer.exchange.is_member))
    a.train_until(5)
    b.train_until(7)
    host, _, port = hub.address.rpartition(":")
    with HubThread(host, int(port)):
        assert eventually(lambda: a.outer.exchange.is_member and b.outer.exchange.is_member)
        together(a, b, until=12)
        assert_equal_shared(a, b)
        close(a, b)
    assert not expired


@pytest.mark.parametrize(
    ("other", "seed", "message"),
    [
        (sw.Outer(every=2, dtype="int8"), 3, "has every=2, and the others have 4"),
        (sw.Outer(every=4, dtype="int8"), 4, "other shared parameters than replica"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(other: sw.Outer, seed: int, message: str) -> None:
    outer = sw.Outer(every=4, dtype="int8")
    with HubThread() as hub:
        a = Replica(hub.address, 0, outer)
        a.outer.join()
        b = Replica(hub.address, 1, other, seed=seed)
        with pytest.raises(PlanError, match=message):
            b.outer.join()
        close(a, b)


def test_a_replica_that_joins_during_a_transfer_does_not_interrupt_it() -> None:
    with HubThread() as hub:
        giver, first, second = (_exchange(hub, number) for number in range(3))
        giver.connect([Progress()], "")
        giver.wait(DEADLINE)
        tickets = []
        for number, joining in enumerate((first, second)):
            joining.connect([Progress(digest="another")], "")
            assert eventually(lambda n=number: len(hub.hub.replicas) == n + 2)  # type: ignore[misc]
            giver.send(0, torch.zeros(1, dtype=torch.uint8), "")
            (decision,) = giver.decided(0, DEADLINE)
            giver.applied(0, decision)
            tickets.append(decision.ticket)
        states = [bytes([number]) * STATE_BYTES for number in range(2)]
        for ticket, state in zip(tickets, states, strict=True):  # their chunks alternate
            giver.give_state(ticket, state)
        for joining, state in zip((first, second), states, strict=True):
            joining.wait(DEADLINE)
            assert joining.take_state(joining.ticket) == state
        for exchange in (giver, first, second):
            exchange.close()


def test_the_deadline_of_a_lost_replica_does_not_apply_to_the_others() -> None:
    with HubThread() as hub:
        exchanges = [_exchange(hub, number) for number in range(3)]
        for exchange in exchanges:
            exchange.connect([Progress()], "")
            exchange.wait(DEADLINE)
        first, *others = exchanges
        first.send(0, torch.zeros(1, dtype=torch.uint8), "")
        assert eventually(lambda: hub.hub._rounds[0].timer is not None)
        first.close()
        assert eventually(lambda: hub.hub._rounds[0].timer is None)
        for exchange in others:
            exchange.close()


def test_a_replica_sends_its_state_for_every_ticket_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HubThread() as hub:
        a = Replica(hub.address, 0, sw.Outer(every=1, dtype="float64", deadline=DEADLINE))
        a.outer.join()
        exchange, decided = a.outer.exchange, a.outer.exchange.decided
        given: list[int] = []

        def decided_with_tickets(fragment: int, seconds: float) -> list[Decision]:
            found = decided(fragment, seconds)
            return [replace(one, ticket=ticket) for one in found for ticket in (1, 2)]

        monkeypatch.setattr(exchange, "decided", decided_with_tickets)
        monkeypatch.setattr(exchange, "give_state", lambda ticket, _: given.append(ticket))
        a.train(1)
        assert given == [1, 2]
        close(a)


def _exchange(hub: HubThread, number: int) -> HubExchange:
    hello = {"num_ranks": 1, "num_replicas": 1, "deadline": DEADLINE, "options": {}}
    return HubExchange(hub.address, number, 0, hello)


def test_a_silent_stranger_does_no_harm() -> None:
    outer = sw.Outer(every=2, dtype="int8")
    with HubThread() as hub:
        host, _, port = hub.address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
            a = Replica(hub.address, 0, outer)
            a.train(2)
            assert a.outer.progress[0].round == 1
            close(a)


class Life:
    """A replica that trains, pauses, dies and comes back at random."""

    def __init__(self, hub: str, number: int, seed: int, seen: dict[Any, int]) -> None:
        self._make = partial(Replica, hub, number, FUZZED, num_replicas=3)
        self._random = random.Random(f"{seed}/{number}")
        self._seen = seen  # checksums of shared parameters by fragment and digest
        self.now = self._make()

    def run(self) -> None:
        for _ in range(self._random.randint(4, 9)):
            match self._random.choice(["train", "train", "train", "pause", "die"]):
                case "train":
                    for _ in range(self._random.randint(1, 9)):
                        self.now.train(1)
                        self.check()
                case "pause":
                    time.sleep(self._random.random() * 0.2)
                case "die":
                    close(self.now)
                    time.sleep(self._random.random() * 0.1)
                    self.now = self._make()
                    with contextlib.suppress(PeerLost):  # all other replicas have ended
                        self.now.outer.join()
        self.check()

    def check(self) -> None:
        """Check that equal digests mean equal bits."""
        outer = self.now.outer
        for number, fragment in enumerate(outer.fragments):
            total = 0
            for parameter in fragment.parameters:
                anchor = local_of(outer.state[parameter]["anchor"])
                total = zlib.crc32(anchor.numpy().tobytes(), total)
            digest = outer.progress[number].digest
            if digest != "start":
                assert self._seen.setdefault((number, digest), total) == total


FUZZED = sw.Outer(every=3, fragments=2, delay=1, mixing=0.5, dtype="int4", deadline=0.25)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 25))]
)
def test_no_program_of_deaths_and_delays_leaves_replicas_unequal(seed: int) -> None:
    chance = random.Random(seed)
    hub = HubThread()
    host, _, port = hub.address.rpartition(":")
    seen: dict[Any, int] = {}
    lives = [Life(hub.address, number, seed, seen) for number in range(3)]
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(life.run) for life in lives]
        while chance.random() < 0.4:
            time.sleep(chance.random() * 0.3)
            hub.stop()
            hub = HubThread(host, int(port))
        for run in runs:
            run.result(timeout=100)
    close(*(life.now for life in lives))
    hub.stop()
    assert seen
