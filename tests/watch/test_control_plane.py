"""What a rank asks of the job's store does not grow with the number of ranks, and always ends."""

import contextlib
import gc
import logging
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm import process_group
from shardwise.comm.api import CollectiveId, RankGroup
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.queue import QueueState
from shardwise.watch import monitor as module
from shardwise.watch.monitor import (
    Monitor,
    Patience,
    _await_end,
)
from shardwise.watch.python_stack import calls_of
from shardwise.watch.status import Report
from shardwise.watch.store import BoundedStore
from tests.waiting import eventually

# Heartbeats of the test alone. A rank is silent after as many of them as usual.
BEATS = Patience().silent_seconds / Patience().beat_seconds
QUIET = Patience(beat_seconds=1000.0, silent_seconds=1000.0 * BEATS)
FAILED = Report(0, 0, 3, "forward", (), "PeerLost", "rank 0 lost rank 3: it closed the connection")
NUM_DRIVERS = 4


def waiting(looks: int, size: int) -> Report:
    """The report of a rank that runs a collective of all ranks."""
    state = QueueState(1, 1, CollectiveId(1, "gather a", 64, tuple(range(size))), ())
    return Report(0, looks, 3, "forward", (state,))


class Counted:
    """A store that counts its calls and the bytes of them, and may answer late or with errors."""

    def __init__(self, store: Any = None) -> None:
        self.store = HashStore() if store is None else store
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0
        self.before: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self.before()
            answer = function(*args)
            self.calls[name] += 1
            self.num_bytes += len(repr(args)) + len(repr(answer))
            return answer

        return call

    def cost(self, run: Callable[[], object]) -> tuple[int, int]:
        """Return the number of calls that ``run`` makes, and their bytes."""
        calls, num_bytes = self.calls.total(), self.num_bytes
        run()
        return self.calls.total() - calls, self.num_bytes - num_bytes


def monitor_of(store: Any, rank: int, size: int, patience: Patience = QUIET) -> Monitor:
    return Monitor(BoundedStore(store, 20.0), "group", rank, size, patience)


def look(monitor: Monitor, report: Report) -> None:
    monitor.publish(report)
    monitor.check_reports(report.epoch)
    monitor.check_heartbeats()


def fail() -> None:
    raise RuntimeError("no route to host")


# -- the number of calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 4096])
def test_a_look_and_a_heartbeat_take_a_constant_number_of_calls(size: int) -> None:
    store = Counted()
    made: list[Monitor] = []
    start = store.cost(lambda: made.append(monitor_of(store, 0, size)))
    assert start[0] == 2
    assert start[1] < 200
    [monitor] = made
    looks = [store.cost(lambda i=i: look(monitor, waiting(i, size))) for i in range(6)]  # type: ignore[misc]
    assert [calls for calls, _ in looks] == [2, 2, 4, 2, 2, 2], "at the third, it is stuck"
    assert max(num_bytes for _, num_bytes in looks) < 600
    beat = store.cost(lambda: monitor.beat(replace(waiting(6, size), count=1)))
    assert beat[0] == 3
    assert beat[1] < 600
    in_torch = replace(waiting(0, size), blocked_with=tuple(range(size)))
    blocked = store.cost(lambda: monitor.publish(in_torch))
    assert blocked[0] <= 2
    assert blocked[1] < 600


def test_one_rank_judges_the_reports_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    size, store = 16, HashStore()
    judges: list[int] = []
    monitors = [monitor_of(store, rank, size) for rank in range(size)]
    reports = Monitor.reports

    def counted(monitor: Monitor, epoch: int) -> list[Report | None]:
        judges.append(monitor._rank)
        return reports(monitor, epoch)

    monkeypatch.setattr(Monitor, "reports", counted)
    for looks in range(20):  # a straggler, for which all others wait, comes at look 8
        for rank, monitor in enumerate(monitors):
            look(monitor, waiting(0 if rank == 5 and looks < 8 else looks, size))
    assert judges == [5], "when all are stuck"


def test_a_rank_that_moves_is_judged_again_when_all_are_stuck() -> None:
    store, size = HashStore(), 2
    monitors = [monitor_of(store, rank, size) for rank in range(size)]
    for epoch in range(3):
        moved = replace(waiting(0, size), epoch=epoch)
        stuck = [
            replace(waiting(2, size), epoch=epoch, queues=(QueueState(rank, rank, None, ()),))
            for rank in range(size)
        ]
        for report in (stuck[0], moved, stuck[0]):
            look(monitors[0], report)
        with pytest.raises(sw.RanksDiverged):
            look(monitors[1], stuck[1])
        monitors[0].announce(replace(FAILED, epoch=epoch))


@pytest.mark.parametrize("size", [8, 4096])
def test_a_rank_recovers_with_a_constant_number_of_calls(size: int) -> None:
    shared = HashStore()
    store = Counted(shared)
    first, second = monitor_of(shared, 0, size), monitor_of(store, 1, size)
    for rank in {2, 3, 4} & set(range(size)):  # the rest of the tree
        shared.set(f"shardwise/group/came/0/{rank}", "")
    before = store.calls["check"]
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(store.cost, lambda: second.meet(0))
        assert eventually(lambda: store.calls["check"] > before), "it waits for the others"
        assert not met.done()
        first.meet(0)
        calls, num_bytes = met.result()
    polls = store.calls["check"] - before
    assert calls - polls == 1
    assert num_bytes - 60 * polls < 800


def test_the_ranks_that_others_wait_for_after_an_error_are_found() -> None:
    """Rank 4 is below 1, so ranks 0 and 1 wait for it; 6 is below 2."""
    store = HashStore()
    monitor = monitor_of(store, 0, 7)
    for rank in (3, 5):
        store.set(f"shardwise/group/came/0/{rank}", "")
    assert sorted(monitor.absent(0, 8)) == [4, 6]
    assert len(monitor.absent(0, 1)) == 1
    for name in ("came/0/4", "came/0/6", "came/0/1", "came/0/2", "met/0"):
        store.set(f"shardwise/group/{name}", "")
    assert monitor.absent(0, 8) == []


def test_ranks_recover_after_a_call_that_was_given_up_has_had_an_effect() -> None:
    store = HashStore()
    store.set("shardwise/group/came/0/1", "")  # the answer was lost
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(monitor_of(store, 1, 2).meet, 0)
        assert not again.done()
        monitor_of(store, 0, 2).meet(0)
        again.result()


def test_a_rank_creates_process_groups_with_a_constant_number_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks of a device queue come before one of them enters the creation in C++."""
    costs = []
    for size in (8, 4096):
        store = Counted()
        monkeypatch.setattr(process_group, "default_store", lambda store=store: store)
        parent: Any = mock.Mock(group_name="group")
        world = RankGroup(tuple(range(size)), 3, parent)
        queue = ProcessGroupCollectives(world, torch.device("cpu"), "nccl", "queue")
        store.add("key/ranks", size - 1)
        create = partial(queue._meet, "key", world, "a group", timedelta(seconds=60))
        costs.append(store.cost(create))
    assert costs[0][0] == costs[1][0] <= 5


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
    patience = Patience(beat_seconds=0.05)
    store = BoundedStore(TCPStore("127.0.0.1", cable.port), 60.0)
    monitor = Monitor(store, "group", 1, 2, patience)
    look(monitor, waiting(0, 2))
    cable.cut()
    store._seconds = 1.0  # a busy machine may take longer to answer
    began = time.monotonic()
    with pytest.raises(sw.PeerSilent, match="no answer for 1 s from the process that holds the"):
        monitor.check_reports(0)
    for _ in range(50):
        with pytest.raises(sw.PeerSilent, match="is off the network"):
            look(monitor, waiting(1, 2))
    assert time.monotonic() - began < 15.0


def test_a_slow_answer_is_awaited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = Counted()
    bounded = BoundedStore(store, 20.0)  # type: ignore[arg-type]
    answers = threading.Event()
    store.before = lambda: answers.wait(60.0)
    with caplog.at_level(logging.WARNING, "shardwise"), ThreadPoolExecutor(1) as pool:
        result = pool.submit(bounded.add, "counter", 7)
        assert eventually(lambda: "has not answered for 4.0 s" in caplog.text)
        answers.set()
        assert result.result() == 7


def test_heartbeats_go_on_after_an_error_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    store = Counted()
    monitor = monitor_of(store, 0, 2, Patience(beat_seconds=0.01))
    tried = 0

    def fail_and_count() -> None:
        nonlocal tried
        tried += 1
        fail()

    with caplog.at_level(logging.WARNING, "shardwise"):
        store.before = fail_and_count
        assert eventually(lambda: tried > 3)
    assert caplog.text.count("no route to host") == 1
    store.before = lambda: None
    count = int(store.store.get("shardwise/group/heartbeat/0"))
    assert eventually(lambda: int(store.store.get("shardwise/group/heartbeat/0")) > count)
    assert monitor.failure(0) is None


def test_a_monitor_is_freed_while_the_store_gives_no_answer() -> None:
    """The garbage collector may free it on a thread that holds any lock."""
    store, answers = Counted(), threading.Event()
    monitor = monitor_of(store, 0, 2, Patience(beat_seconds=0.01))
    freed = weakref.ref(monitor)
    store.before = lambda: answers.wait(60.0)
    monitors = [monitor]
    del monitor
    freeing = threading.Thread(target=monitors.clear)
    freeing.start()
    freeing.join(10.0)  # a call of the store would take 20 s
    assert not freeing.is_alive()
    assert freed() is None
    answers.set()
    assert eventually(lambda: b"no uncaught" in store.store.get("shardwise/group/heartbeat/0"))


def test_no_destructor_runs_while_python_lists_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python holds a lock then, without which no thread can end."""
    collects: list[bool] = []

    def current_frames() -> dict[int, Any]:
        collects.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    assert calls_of(threading.get_ident()) == ()
    assert collects == [False]
    assert gc.isenabled()


# -- the first failure -----------------------------------------------------------------------------


def test_a_rank_that_knows_the_first_failure_names_it_when_the_store_is_gone() -> None:
    shared = HashStore()
    store = Counted(shared)
    own = monitor_of(store, 1, 4)
    monitor_of(shared, 2, 4).announce(FAILED)
    own.beat(replace(waiting(0, 4), count=1))
    store.before = fail
    with pytest.raises(sw.PeerLost, match="holds the job's store is gone: no route to host"):
        own.failure(1)
    later = replace(FAILED, error="rank 1 lost rank 2: it closed the connection")
    assert own.announce(later) == FAILED


def lost(cause: type[OSError]) -> sw.PeerLost:
    error = sw.PeerLost(f"lost by {cause.__name__}")
    error.__cause__ = cause(7, "text")
    return error


def test_one_rank_explains_a_lost_connection_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REASON_SECONDS", 0.0)  # the rank that is lost cannot say why
    store = Counted()
    monitors = [monitor_of(store, rank, 3) for rank in range(3)]
    for monitor in monitors[:2]:
        monitor.beat(replace(waiting(0, 3), count=1))
    store.calls.clear()
    explained = monitors[0].explain(lost(ConnectionResetError), 0)
    assert str(explained).startswith("lost by ConnectionResetError\n  rank  step")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(monitors[1].explain, lost(ConnectionResetError), 0)
        first = monitors[0].announce(replace(FAILED, error=str(explained)))
        assert str(other.result()) == "lost by ConnectionResetError"
    assert monitors[1].announce(FAILED) == first
    assert store.calls["multi_get"] <= 2, "for the reasons and the table"


@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_whose_connection_was_closed_lets_the_other_side_say_why(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them notices first."""
    monkeypatch.setattr(module, "_REASON_SECONDS", 60.0)
    store = HashStore()
    failing, closed = (monitor_of(store, rank, 2) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        if is_early:
            waits = pool.submit(closed.explain, lost(ConnectionResetError), 0)
            time.sleep(0.1)
            assert not waits.done()
        own = failing.explain(lost(ConnectionAbortedError), 0)
        assert str(own).startswith("lost by ConnectionAbortedError\n  rank  step")
        first = failing.announce(replace(FAILED, error=str(own)))
        if not is_early:
            waits = pool.submit(closed.explain, lost(ConnectionResetError), 0)
        later = waits.result(30.0)
    assert closed.announce(replace(FAILED, error=str(later))) == first


def test_rank_0_waits_before_it_exits_until_others_know_a_failure() -> None:
    store = HashStore()
    first, other = (monitor_of(store, rank, 3) for rank in (0, 1))
    beating = mock.Mock(spec=threading.Thread)
    told = "shardwise/group/told", 3
    common = BoundedStore(store, 20.0), first._known, told
    args: Any = (lambda: beating), SimpleQueue(), 60.0, *common
    exits = threading.Thread(target=_await_end, args=args)
    first.announce(FAILED)
    exits.start()
    exits.join(0.1)
    assert exits.is_alive()
    with pytest.raises(sw.PeerLost, match="rank 0 lost rank 3"):
        other.check_reports(0)
    exits.join(30.0)  # rank 2 may be the dead one
    assert not exits.is_alive()


# -- many ranks ------------------------------------------------------------------------------------


class Rank:
    """One of many ranks, all of which wait for a straggler."""

    def __init__(self, rank: int, size: int, store: BoundedStore) -> None:
        self.monitor = Monitor(store, "group", rank, size, QUIET)
        self.is_alive = True
        self.error = ""
        self.num_looks = 0  # one a second
        self._report = waiting(0, size)

    def beat(self, count: int) -> None:
        """What the heartbeat thread does every two seconds."""
        if self.is_alive:
            self.monitor.beat(replace(self._report, count=count))

    def look(self, count: int) -> None:
        """What `Communicator.wait` does every second."""
        if self.error or not self.is_alive:
            return
        self.num_looks = count
        try:
            look(self.monitor, replace(self._report, looks=count))
        except sw.PeerLost as error:
            explained = self.monitor.explain(error, 0)
            failure = replace(FAILED, failure="PeerSilent", error=str(explained))
            self.error = self.monitor.announce(failure).error


def looks_until_a_death_is_known(size: int, straggler_seconds: float) -> int:
    """All ranks but one wait on one store; then one dies.

    Return how many times the others look, once a second, until all of them know.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port) for _ in range(NUM_DRIVERS)]
    stores = [BoundedStore(client, Patience().store_seconds) for client in clients]
    with mock.patch.object(module, "_beat", return_value=None):  # no thread of its own
        ranks = [Rank(rank, size, stores[rank % NUM_DRIVERS]) for rank in range(size)]
    waiting_ranks, dead = ranks[1:-1], ranks[-1]
    is_over = threading.Event()

    def drive(number: int) -> None:
        """Do what the threads of some of the ranks do; one process cannot run thousands of them."""
        began = time.monotonic()
        for second in count():
            for rank in ranks[number::NUM_DRIVERS]:
                if second % 2 == 0:
                    rank.beat(second)
                if rank is not ranks[0]:
                    rank.look(second)
            if is_over.wait(began + second + 1 - time.monotonic()):
                return

    with ThreadPoolExecutor(NUM_DRIVERS) as pool:
        jobs = [pool.submit(drive, number) for number in range(NUM_DRIVERS)]
        assert not is_over.wait(straggler_seconds)
        assert not any(rank.error for rank in ranks)
        dead.is_alive, began = False, time.monotonic()
        while not all(rank.error for rank in waiting_ranks) and time.monotonic() < began + 60.0:
            time.sleep(0.1)
        is_over.set()
    assert all(job.exception() is None for job in jobs)
    [text] = {rank.error.splitlines()[0] for rank in waiting_ranks}
    assert f"lost rank {size - 1}: its process gave no sign of life" in text
    return max(rank.num_looks for rank in waiting_ranks) - dead.num_looks


@pytest.mark.thorough
def test_a_thousand_ranks_wait_for_a_straggler_and_name_a_death() -> None:
    """On one TCPStore: 30 s for a straggler end nothing; a death is named within 15 s."""
    assert looks_until_a_death_is_known(1000, 30.0) < 15
