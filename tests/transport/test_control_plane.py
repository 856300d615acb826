"""What a rank asks of the job's store does not grow with the number of ranks, and always ends."""

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.transport.api import CollectiveId
from shardwise.transport.health.monitor import Heartbeat, Monitor, Patience, Place, _tell
from shardwise.transport.health.status import QueueState, Report
from shardwise.transport.health.store import BoundedStore
from tests.waiting import eventually

QUIET = Patience(beat_seconds=1000.0)  # no heartbeats but those of the test
FAILED = Report(0, 0, 3, "forward", (), "PeerLost", "rank 0 lost rank 3: it closed the connection")


def waiting(looks: int, size: int) -> Report:
    """The report of a rank that runs a collective of all ranks."""
    state = QueueState(1, 1, CollectiveId(1, "gather a", 64, tuple(range(size))), ())
    return Report(0, looks, 3, "forward", (state,))


class Watched:
    """A store that counts its calls, and may answer late, with errors or not at all."""

    def __init__(self, store: Any = None) -> None:
        self.store = HashStore() if store is None else store
        self.calls: Counter[str] = Counter()
        self.before: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            self.before()
            return function(*args)

        return call


def fail() -> None:
    raise RuntimeError("no route to host")


# -- the number of calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 4096])
def test_a_look_and_a_heartbeat_take_a_constant_number_of_calls(size: int) -> None:
    store: Any = Watched()
    monitor = Monitor(store, "group", 0, size, QUIET)
    assert store.calls.total() == 1, "to start"

    def look(looks: int) -> int:
        store.calls.clear()
        monitor.publish(waiting(looks, size))
        monitor.check_reports(0)
        monitor.check_heartbeats()
        return int(store.calls.total())

    assert [look(looks) for looks in range(6)] == [3, 3, 4, 3, 3, 3]  # the third: it is stuck
    store.calls.clear()
    monitor.beat(Heartbeat(1, waiting(6, size)))
    assert store.calls.total() == 3


def test_one_rank_judges_the_reports_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    size, store = 16, HashStore()
    read: list[int] = []
    monitors = [Monitor(store, "group", rank, size, QUIET) for rank in range(size)]
    reports = Monitor.reports

    def counted(monitor: Monitor, epoch: int) -> list[Report | None]:
        read.append(monitor._rank)
        return reports(monitor, epoch)

    monkeypatch.setattr(Monitor, "reports", counted)
    for looks in range(17):  # a straggler, for which all others wait, comes at look 8
        for rank, monitor in enumerate(monitors):
            monitor.publish(waiting(0 if rank == 5 and looks < 8 else looks, size))
            monitor.check_reports(0)
            monitor.check_heartbeats()
    assert read == [5, 5], "when all are stuck, and after twice as many looks"


def test_ranks_that_were_stuck_before_a_recovery_are_counted_again() -> None:
    store, size = HashStore(), 2
    monitors = [Monitor(store, "group", rank, size, QUIET) for rank in range(size)]
    for epoch in range(3):
        for rank, monitor in enumerate(monitors):
            report = waiting(2, size)
            other = replace(report, epoch=epoch, queues=(QueueState(rank, rank, None, ()),))
            monitor.publish(other)
        with pytest.raises(sw.RanksDiverged):
            monitors[1].check_reports(epoch)
        monitors[0].announce(replace(FAILED, epoch=epoch))


def test_ranks_meet_with_a_constant_number_of_calls() -> None:
    store: Any = Watched()
    monitors = [Monitor(store, "group", rank, 8, QUIET) for rank in range(8)]
    reports = [replace(waiting(0, 8), step=rank) for rank in range(8)]
    with ThreadPoolExecutor(7) as pool:
        early = [pool.submit(monitors[rank].meet, reports[rank]) for rank in range(7)]
        assert eventually(lambda: store.calls["add"] > 7)
        store.calls.clear()
        assert monitors[7].meet(reports[7]) == reports
        assert all(one.result() == reports for one in early)
    assert store.calls["set"] == 1
    assert store.calls["check"] == store.calls["multi_get"] == 8, "one each per rank"


# -- calls that get no answer ----------------------------------------------------------------------


class Cable:
    """A connection to a store, which can be cut: nothing is closed, and nothing arrives."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._sockets[0].accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._is_cut.is_set():
                    to.sendall(data)


@pytest.fixture
def cable() -> Iterator[Cable]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(server.port)
    yield cable
    cable.close()
    del server


def test_a_rank_that_is_cut_off_from_the_store_raises(cable: Cable) -> None:
    patience = Patience(beat_seconds=0.05, silent_seconds=1.0)
    monitor = Monitor(TCPStore("127.0.0.1", cable.port), "group", 1, 2, patience)
    monitor.publish(waiting(0, 2))
    cable.cut()
    began = time.monotonic()
    with pytest.raises(sw.PeerSilent, match="no answer for 1 s from the process that holds the"):
        monitor.check_reports(0)
    for _ in range(50):
        with pytest.raises(sw.PeerSilent, match="is off the network"):
            monitor.publish(waiting(1, 2))
    assert time.monotonic() - began < 15.0


def test_a_slow_answer_is_awaited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Watched()
    bounded = BoundedStore(store, 20.0)
    answers = threading.Event()
    store.before = lambda: answers.wait(60.0)
    with caplog.at_level(logging.WARNING, "shardwise"), ThreadPoolExecutor(1) as pool:
        result = pool.submit(bounded.add, "counter", 7)
        assert eventually(lambda: "has not answered for 4.0 s" in caplog.text)
        answers.set()
        assert result.result() == 7


def test_heartbeats_go_on_after_an_error_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Watched()
    monitor = Monitor(store, "group", 0, 2, Patience(beat_seconds=0.01))
    with caplog.at_level(logging.WARNING, "shardwise"):
        store.before = fail
        store.calls.clear()
        assert eventually(lambda: store.calls["set"] > 2)
    assert caplog.text.count("no route to host") == 1
    store.before = lambda: None
    count = int(store.store.get("shardwise/group/heartbeat/0"))
    assert eventually(lambda: int(store.store.get("shardwise/group/heartbeat/0")) > count)
    assert monitor.failure(0) is None


# -- the first failure -----------------------------------------------------------------------------


def test_a_rank_that_knows_the_first_failure_names_it_when_the_store_is_gone() -> None:
    shared = HashStore()
    store: Any = Watched(shared)
    own = Monitor(store, "group", 1, 4, QUIET)
    Monitor(shared, "group", 2, 4, QUIET).announce(FAILED)
    own.beat(Heartbeat(1, waiting(0, 4)))
    store.before = fail
    with pytest.raises(sw.PeerLost, match="holds the job's store is gone: no route to host"):
        own.publish(waiting(0, 4))
    later = replace(FAILED, error="rank 1 lost rank 2: it closed the connection")
    assert own.announce(later) == FAILED


def test_one_rank_explains_a_lost_connection_for_all() -> None:
    shared: Any = Watched()
    monitors = [Monitor(shared, "group", rank, 3, QUIET) for rank in range(3)]
    for monitor in monitors[:2]:
        monitor.beat(Heartbeat(1, waiting(0, 3)))
    shared.calls.clear()
    lost = sw.PeerLost("rank 0 lost rank 2: it closed the connection")
    explained = monitors[0].explain(lost, 0)
    assert str(explained).startswith(f"{lost}\n  rank  step")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(monitors[1].explain, sw.PeerLost("rank 1 lost rank 0"), 0)
        first = monitors[0].announce(replace(FAILED, error=str(explained)))
        assert str(other.result()) == "rank 1 lost rank 0"
    assert monitors[1].announce(replace(FAILED, error="rank 1 lost rank 0")) == first
    assert shared.calls["check"] <= 2, "for the reasons and the table"


def test_rank_0_waits_before_it_exits_until_others_know_a_failure() -> None:
    store, place = HashStore(), Place()
    bounded = BoundedStore(store, 10.0)
    first, other = (
        Monitor(store, "group", rank, 3, QUIET, place=one) for rank, one in ((0, place), (1, None))
    )
    key = "shardwise/group/ranks that know the failure of epoch "
    tell = threading.Thread(target=_tell, args=(lambda: first, bounded, place, key, 2, 60.0))
    first.announce(FAILED)
    tell.start()
    tell.join(0.1)
    assert tell.is_alive()
    with pytest.raises(sw.PeerLost, match="rank 0 lost rank 3"):
        other.check_reports(0)
    tell.join(30.0)  # rank 2 may be the dead one
    assert not tell.is_alive()


# -- many ranks ------------------------------------------------------------------------------------


class Rank:
    """One of many ranks, which waits for a straggler."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self.is_alive = self.waits = True
        self.lost: tuple[float, str] | None = None
        self.monitor: Monitor | None = None
        store = TCPStore("127.0.0.1", port)
        self.monitor = Monitor(
            store, "group", rank, size, Patience(), weakref.WeakMethod(self.beat)
        )

    def beat(self, count: int, /) -> None:
        if self.is_alive and self.monitor is not None:
            self.monitor.beat(Heartbeat(count, waiting(0, 2)))

    def look(self, number: int) -> None:
        if self.lost is not None or not (self.is_alive and self.waits):
            return
        assert self.monitor is not None
        try:
            self.monitor.publish(waiting(number, 2))
            self.monitor.check_reports(0)
            self.monitor.check_heartbeats()
        except sw.StepError as error:
            self.lost = time.monotonic(), str(error)


@pytest.mark.thorough
def test_a_thousand_ranks_wait_for_a_straggler_and_name_a_death() -> None:
    """On one TCPStore: 30 s for a straggler end nothing; a death is named within 15 s."""
    size, dead = 1000, 500
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [Rank(rank, size, server.port) for rank in range(size)]
    members[7].waits = False
    is_over = threading.Event()

    def look(ranks: list[Rank]) -> None:
        for number in count():
            for one in ranks:
                one.look(number)
            if is_over.wait(1.0):
                return

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(look, members[first::8]) for first in range(8)]
        time.sleep(30.0)
        assert all(one.lost is None for one in members)
        members[dead].is_alive, began = False, time.monotonic()
        others = [one for one in members if one.waits and one.is_alive]
        while any(one.lost is None for one in others) and time.monotonic() < began + 60.0:
            time.sleep(0.1)
        is_over.set()
    assert all(job.exception() is None for job in jobs)
    found = [one.lost for one in others if one.lost is not None]
    assert len(found) == size - 2
    text = f"rank {dead - 1} lost rank {dead}: its process gave no sign of life"
    assert all(error.startswith(text) for _, error in found)
    assert max(at for at, _ in found) - began < 15.0
