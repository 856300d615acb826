"""Accelerators that wait forever are detected by the heartbeat thread, since no host waits."""

import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm import communicator as module, process_group
from shardwise.comm.api import RankGroup
from shardwise.comm.communicator import Communicator
from shardwise.comm.device import KINDS, Device
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.watch import ranks as watch_ranks
from shardwise.watch.monitor import Patience
from shardwise.watch.status import Report
from shardwise.watch.store import BoundedStore
from tests.logged import logged
from tests.watching import error_of, monitor_of, watch_of, watch_with

PATIENCE = Patience(poll_seconds=0.02, beat_seconds=0.02, silent_seconds=60.0)
DEADLINE_SECONDS = 60.0


class Late(Device):
    """A device whose events complete when a test says so."""

    is_accelerator = True
    is_open = True

    def is_over(self, event: Any) -> bool:  # noqa: ARG002
        return Late.is_open


class Group:
    """A process group that does nothing."""

    group_name = "group"

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.was_aborted = False

    def abort(self) -> None:
        assert not self.was_aborted
        self.was_aborted = True


class Ranks:
    """The communicators of two ranks in this process."""

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()  # created so far
        parents: list[Any] = [Group(), Group()]
        worlds = [RankGroup((0, 1), rank, parent) for rank, parent in enumerate(parents)]
        self._alive = parents
        with watch_with(PATIENCE):
            self.communicators = [Communicator(world, torch.device("cpu")) for world in worlds]
        for comm in self.communicators:
            comm.place.step, comm.place.where = 7, "forward of a"

    def gather(self, rank: int, label: str) -> Tensor:
        comm = self.communicators[rank]
        flat = torch.zeros(4)
        comm.wait(comm.gather.all_gather(flat, comm.world, label))
        return flat

    def new_group(self, _ranks: RankGroup, _backend: str, name: str, **_options: bool) -> Group:
        self.groups.append(Group(name))
        return self.groups[-1]

    def recover(self) -> None:
        threads = [threading.Thread(target=comm.watch.recover) for comm in self.communicators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert [comm.watch.epoch for comm in self.communicators] == [1, 1]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    store = HashStore()
    monkeypatch.setattr(Late, "is_open", True)
    monkeypatch.setitem(KINDS, "cpu", Late)
    monkeypatch.setattr(
        watch_ranks, "connect_to_store", lambda _patience: BoundedStore(store, 60.0)
    )
    monkeypatch.setattr(
        module,
        "make_collectives",
        lambda world, device, name: ProcessGroupCollectives(world, device, "nccl", name),
    )
    monkeypatch.setattr(process_group, "_all_gather", lambda *_args, **_kwargs: None)
    # Both ranks are in one thread, so neither waits for the other.
    monkeypatch.setattr(process_group, "group_timeout", lambda _parent: timedelta())
    monkeypatch.setattr(ProcessGroupCollectives, "_meet", lambda *_: None)
    made = Ranks()
    monkeypatch.setattr(process_group, "new_group", made.new_group)
    yield made
    Late.is_open = True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ranks_that_wait_for_different_things_get_one_error(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.gather(rank, "gather a")
        assert watch_of(ranks.communicators[rank])._states()[0].running is None
    Late.is_open = False
    for rank, label in enumerate(("gather b", "gather c")):
        ranks.gather(rank, label)  # no host waits
    # All are aborted; otherwise the device would never continue.
    until(lambda: all(group.was_aborted for group in ranks.groups))
    texts = []
    for rank in range(2):
        with pytest.raises(sw.RanksDiverged) as caught:
            ranks.gather(rank, "gather d")
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert re.search(r"\n  0 +7 +forward of a +gather a +gather b ", texts[0])
    assert re.search(r"\n  1 +7 +forward of a +gather a +gather c ", texts[0])


def test_after_an_error_ranks_continue_with_new_groups(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.gather(rank, "gather a")
    before = {group.name for group in ranks.groups}
    ranks.communicators[1].watch.abort(ValueError("it hurts"))
    Late.is_open = False
    ranks.gather(0, "gather b")
    until(lambda: error_of(ranks.communicators[0]) is not None)
    message = "rank 1 gave up in step 7, .*: ValueError: it hurts"
    with pytest.raises(sw.PeerAborted, match=message):
        ranks.communicators[0].watch.recover()  # as at the start of its next step
    Late.is_open = True
    ranks.recover()
    num_groups = len(ranks.groups)
    for rank in range(2):
        ranks.gather(rank, "gather b")
    after = {group.name for group in list(ranks.groups)[num_groups:]}
    assert after
    assert not after & before
    assert not any(group.was_aborted for group in list(ranks.groups)[num_groups:])


@pytest.mark.parametrize("labels", [("gather a", "gather a"), ("gather a",)])
def test_a_device_that_may_continue_is_no_error(ranks: Ranks, labels: tuple[str, ...]) -> None:
    """All ranks have begun the gather, or one rank is busy."""
    Late.is_open = False
    for rank, label in enumerate(labels):
        ranks.gather(rank, label)
    until(lambda: watch_of(ranks.communicators[0])._device_looks.count > 12)
    Late.is_open = True
    until(lambda: watch_of(ranks.communicators[0])._device_looks.count == 0)
    for comm in ranks.communicators:
        assert not comm.watch.is_broken
        comm.watch.recover()
        assert comm.watch.epoch == 0


def test_a_device_that_waits_while_the_store_is_gone_is_an_error(ranks: Ranks) -> None:
    comm = ranks.communicators[0]
    gone = RuntimeError("no route to host")
    monitor_of(comm)._store._store = mock.Mock(
        **{"set.side_effect": gone, "compare_set.side_effect": gone}
    )
    Late.is_open = False
    ranks.gather(0, "gather a")
    until(lambda: error_of(comm) is not None)
    with pytest.raises(sw.PeerLost, match="holds the job's store is gone: no route to host"):
        comm.watch.recover()


def test_a_recovery_that_gets_no_answer_from_the_store_is_tried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = ranks.communicators[0]
    for one in ranks.communicators:
        one.watch.abort(ValueError("it hurts"))
    with monkeypatch.context() as patch:
        patch.setattr(monitor_of(comm), "meet", mock.Mock(side_effect=sw.PeerSilent("no answer")))
        with pytest.raises(sw.PeerSilent, match="no answer"):
            comm.watch.recover()
    ranks.recover()


def test_a_communicator_is_freed_while_its_device_is_watched(ranks: Ranks) -> None:
    ranks.gather(0, "gather a")
    comm = weakref.ref(ranks.communicators.pop(0))
    until(lambda: comm() is None)


def test_only_stream_ordered_backends_are_watched() -> None:
    world = RankGroup((0, 1), 0, mock.Mock())
    for backend, watched in (("nccl", True), ("xccl", True), ("fake", False), ("gloo", False)):
        queue = ProcessGroupCollectives(world, torch.device("cpu"), backend, "queue")
        assert queue.is_monitored is watched


def test_without_a_watch_no_collective_is_remembered(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.parts, "new_watch", None)
    comm = Communicator(ranks.communicators[0].world, torch.device("cpu"))
    flat = torch.zeros(4)
    works = [weakref.ref(comm.gather.all_gather(flat, comm.world, "gather")) for _ in range(3)]
    # While the heartbeat reads a frame of this thread, the frame's variables stay alive.
    until(lambda: not any(work() for work in works))


def test_an_error_found_while_this_rank_raises_one_is_not_raised_later(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = ranks.communicators[0]
    looking, goes_on = threading.Event(), threading.Event()

    def check_reports(_epoch: int) -> None:
        looking.set()
        goes_on.wait(DEADLINE_SECONDS)
        raise sw.PeerAborted("rank 1 gave up")

    monkeypatch.setattr(monitor_of(comm), "check_reports", check_reports)
    Late.is_open = False
    ranks.gather(0, "gather a")
    assert looking.wait(DEADLINE_SECONDS)
    aborting = threading.Thread(target=comm.watch.abort, args=(ValueError("it hurts"),))
    aborting.start()
    aborting.join(0.05)  # long enough to overtake the look, if that were possible
    goes_on.set()
    aborting.join(DEADLINE_SECONDS)
    time.sleep(0.05)  # for the look to end
    assert comm.watch.is_broken
    assert error_of(comm) is None


def test_an_error_is_raised_when_its_step_has_ended(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the rank could go on before the heartbeat thread has aborted the groups."""
    comm, goes_on = ranks.communicators[0], threading.Event()
    ranks.gather(0, "gather a")
    ranks.communicators[1].watch.abort(ValueError("it hurts"))
    before_stop = mock.Mock(side_effect=lambda: goes_on.wait(DEADLINE_SECONDS))
    monkeypatch.setattr(watch_of(comm), "_write_flight_records", before_stop)
    Late.is_open = False
    ranks.gather(0, "gather b")
    until(lambda: before_stop.called)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(comm.watch.recover)  # as at the start of the next step
        time.sleep(0.05)
        assert not step.done()
        goes_on.set()
        with pytest.raises(sw.PeerAborted, match="it hurts"):
            step.result(DEADLINE_SECONDS)
    assert comm.watch.is_broken
    assert ranks.groups[0].was_aborted


def test_a_wait_is_logged_again_when_it_is_twice_as_long(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the store has answered late, which is not counted in the time that is logged."""
    monitor = monitor_of(ranks.communicators[0])
    watch_of(ranks.communicators[0]).patience = replace(PATIENCE, log_seconds=0.2)
    reports = monitor.reports

    def late(epoch: int) -> list[Report | None]:
        if not any(" has waited for " in one for one in said):
            time.sleep(0.5)
        return reports(epoch)

    monkeypatch.setattr(monitor, "reports", late)
    Late.is_open = False
    with logged("shardwise") as said:
        ranks.gather(0, "gather a")
        until(lambda: "\n".join(said).count(" has waited for ") > 1)
    first, second = map(float, re.findall(r" has waited for (\d+\.\d) s", "\n".join(said))[:2])
    assert second > 1.5 * first


def test_a_rank_whose_device_has_failed_tells_the_others(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a device assert, for example, every call of CUDA raises."""
    failed = mock.Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))
    monkeypatch.setattr(ranks.communicators[1].gather, "state", failed)
    ranks.communicators[1].watch.abort(ValueError("it hurts"))
    assert ranks.communicators[1].watch.is_broken
    Late.is_open = False
    ranks.gather(0, "gather b")
    until(lambda: error_of(ranks.communicators[0]) is not None)
    with pytest.raises(sw.PeerAborted, match="ValueError: it hurts"):
        ranks.communicators[0].watch.recover()


def test_an_interrupt_while_an_error_is_announced_leaves_the_rank_out_of_step(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = ranks.communicators[0]
    monkeypatch.setattr(monitor_of(comm), "announce", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        comm.watch.abort(ValueError("first"))
    assert comm.watch.is_broken, "the next step has to recover"
