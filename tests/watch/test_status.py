"""The verdict on the reports of all ranks: when they raise an error, and its message."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm.api import CollectiveId
from shardwise.comm.queue import QueueState
from shardwise.watch.monitor import Monitor, Patience
from shardwise.watch.ranks import NUM_RECENT, RecentUnits
from shardwise.watch.status import (
    _ERRORS,
    LOOKS,
    Report,
    verdict,
)
from shardwise.watch.store import BoundedStore

counts = st.integers(0, 1 << 40)
# Few characters, because hypothesis takes seconds to build its tables of all of Unicode.
texts = st.text(alphabet='ab 1."\\\n\u00e9\u20ac', max_size=20)
collectives = st.builds(
    CollectiveId,
    number=counts,
    label=texts,
    slot_bytes=counts,
    ranks=st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


def program(number: int, num_ranks: int = 2) -> CollectiveId:
    """The ``number``-th collective of a queue whose ranks agree."""
    return CollectiveId(number, f"gather layers.{number}", 64, tuple(range(num_ranks)))


def gather(number: int, label: str, num_ranks: int = 2) -> CollectiveId:
    return CollectiveId(number, f"gather {label}", 64, tuple(range(num_ranks)))


def error_of(reports: Sequence[Report | None], epoch: int = 0) -> sw.StepError | None:
    return verdict(reports, epoch)


def monitor_of(store: Any, rank: int, size: int = 2, group: str = "group") -> Monitor:
    return Monitor(BoundedStore(store, 20.0), group, rank, size, Patience())


def queue(ended: int, running: CollectiveId | None) -> QueueState:
    """A queue whose first ``ended`` collectives ended."""
    tags = tuple(program(number).tag for number in range(1, ended + 1))
    begun = ended + (running is not None)
    return QueueState(begun, begun, running, tags[-16:])


def report(*queues: QueueState, looks: int = LOOKS, epoch: int = 0, step: int = 7) -> Report:
    return Report(epoch, looks, step, "forward of layers.0", queues)


IDLE = queue(0, None)
# Rank 0 waits for one unit and rank 1 for another.
DEADLOCK = (
    report(queue(2, gather(3, "a")), IDLE),
    report(queue(2, gather(3, "b")), IDLE),
)
# Both wait for the same collective: the network is slow.
SLOW = (report(queue(2, program(3)), IDLE), report(queue(2, program(3)), IDLE))


# -- collectives and queues ------------------------------------------------------------------------


def test_different_collectives_have_different_tags() -> None:
    different = [
        CollectiveId(number, label, slot_bytes, group=group)
        for number in range(1, 20)
        for label in ("gather a", "gather b", "reduce a", "gather a 1")
        for slot_bytes in (0, 16, 64)
        for group in ("a", "b")
    ]
    assert len({collective.tag for collective in different}) == len(different)


@given(collectives)
def test_a_tag_is_the_same_everywhere_and_fits_gloo(collective: CollectiveId) -> None:
    same = CollectiveId(collective.number, collective.label, collective.slot_bytes)
    assert collective.tag == same.tag
    assert 0 <= collective.tag < 1 << 31


def test_a_queue_has_begun_running_and_ended_collectives() -> None:
    state = queue(2, program(3))
    assert [state.has_begun(program(number)) for number in range(1, 5)] == [True, True, True, False]
    assert not state.has_begun(CollectiveId(3, "gather layers.9", 64)), "another label"
    assert not state.has_begun(CollectiveId(3, "gather layers.3", 32)), "another size"
    assert not queue(2, None).has_begun(program(3))


# -- reports ---------------------------------------------------------------------------------------


def test_a_rank_sees_the_last_report_of_each_rank() -> None:
    store = HashStore()
    monitors = [monitor_of(store, rank) for rank in range(2)]
    other = monitor_of(store, 0, group="another group")
    for monitor in (*monitors, other):
        monitor.check_reports(epoch=0)
    for report_, monitor in zip(SLOW, monitors, strict=True):
        monitor.publish(report_)
        monitor.check_reports(epoch=0)
    for report_, monitor in zip(DEADLOCK, monitors, strict=True):
        monitor.publish(replace(report_, looks=0))
        monitor.check_reports(epoch=0)
    for report_, monitor in zip(DEADLOCK, monitors, strict=True):
        monitor.publish(report_)
    monitors[0].check_reports(epoch=0)
    with pytest.raises(
        sw.RanksDiverged, match=r"\n  1 +7 "
    ) as found:  # by the last one to be stuck
        monitors[1].check_reports(epoch=0)
    monitors[1].announce(replace(SLOW[1], failure="RanksDiverged", error=str(found.value)))
    with pytest.raises(sw.RanksDiverged, match=r"\n  1 +7 "):
        monitors[0].check_reports(epoch=0)
    for monitor in monitors:
        monitor.check_reports(epoch=1)
    other.check_reports(epoch=0)


def test_a_rank_that_announced_an_error_keeps_publishing_it() -> None:
    """It may wait again in the same epoch, while other ranks have not seen the error."""
    store = HashStore()
    monitors = [monitor_of(store, rank) for rank in range(2)]
    failure, other = (
        replace(SLOW[rank], failure="PeerAborted", error=f"rank {rank} gave up") for rank in (0, 1)
    )
    monitors[0].announce(failure)
    monitors[0].publish(SLOW[0])
    with pytest.raises(sw.PeerAborted, match="rank 0 gave up"):
        monitors[1].check_reports(epoch=0)
    assert str(monitors[1].announce(other).raised) == "rank 0 gave up"
    monitors[0].publish(replace(SLOW[0], epoch=1))
    monitors[1].check_reports(epoch=1)


# -- verdicts --------------------------------------------------------------------------------------


def test_a_deadlock_names_the_place_of_every_rank() -> None:
    error = error_of(DEADLOCK)
    assert isinstance(error, sw.RanksDiverged)
    rows = str(error).splitlines()[1:4]
    assert [row.split() for row in rows] == [
        ["rank", "step", "in", "last", "completed", "waits", "for", "Python"],
        ["0", "7", "forward", "of", "layers.0", "-", "-", "-"],
        ["1", "7", "forward", "of", "layers.0", "-", "-", "-"],
    ]
    assert "same units in the same order" in str(error)
    assert "must also call sw.save, sw.clip_grad_norm_" in str(error)


def test_a_collective_that_one_rank_never_began_is_a_deadlock() -> None:
    """That rank waits in the other queue, for a collective that the first rank never launched."""
    waits_for_gather = report(queue(2, program(3)), queue(1, None))
    waits_for_reduce = report(queue(2, None), queue(1, program(2)))
    assert isinstance(error_of((waits_for_gather, waits_for_reduce)), sw.RanksDiverged)


def test_ranks_that_wait_for_nothing_at_all_are_a_deadlock() -> None:
    assert isinstance(error_of((report(IDLE, IDLE), report(IDLE, IDLE))), sw.RanksDiverged)


def test_an_exchange_whose_thread_has_not_run_yet_is_no_deadlock() -> None:
    """On an overloaded host the thread that begins exchanges may wait for a processor."""
    issued = QueueState(2, 1, None, (gather(1, "blocks.0").tag,))
    assert error_of([report(issued, IDLE), report(issued, IDLE)]) is None
    begun = QueueState(2, 2, None, (gather(1, "blocks.0").tag,))
    assert isinstance(error_of([report(begun, IDLE), report(begun, IDLE)]), sw.RanksDiverged)


def test_a_rank_that_waits_for_a_stuck_rank_is_stuck_too() -> None:
    """Two replicas of two shards; rank 3 diverges. Rank 2 waits for it. Ranks 0 and 1 have reduced
    with each other and wait for 2 and 3.
    """
    rows, columns = ((0, 1), (0, 1), (2, 3), (2, 3)), ((0, 2), (1, 3)) * 2
    in_row, in_column = (
        [CollectiveId(number, "reduce a", 64, ranks) for ranks in groups]
        for number, groups in ((3, rows), (4, columns))
    )
    tags = in_row[0].tag, in_column[0].tag

    def first(rank: int) -> Report:
        return report(IDLE, QueueState(4, 4, in_row[rank], ()))

    def second(rank: int) -> Report:
        return report(IDLE, QueueState(4, 4, in_column[rank], tags[:1]))

    done = report(IDLE, QueueState(4, 4, None, tags))
    elsewhere = report(queue(2, gather(3, "b")), queue(2, None))
    stuck = error_of([second(0), second(1), first(2), elsewhere])
    assert isinstance(stuck, sw.RanksDiverged)
    assert error_of([second(0), second(1), first(2), first(3)]) is None
    assert error_of([second(rank) for rank in range(4)]) is None
    assert error_of([second(0), second(1), done, second(3)]) is None


# -- the first difference --------------------------------------------------------------------------


def difference(*ways: str, steps: tuple[int, ...] = (7, 7, 7), first: int = 1) -> str:
    """The first difference, in the verdict on ranks that entered the units of ``ways``."""
    states = [report(queue(2, gather(3, str(i), len(ways))), IDLE) for i in range(len(ways))]
    reports = [
        replace(state, step=step, entered=tuple(enumerate(way, start=first)))
        for state, step, way in zip(states, steps, ways, strict=False)
    ]
    lines = str(error_of(reports)).splitlines()
    return next((line for line in lines if line.startswith("They differ")), "")


def test_the_first_units_in_which_ranks_differ_are_named() -> None:
    expected = "They differ from call 2 of the step on: rank 0, 2 entered a; rank 1 entered c."
    assert difference("rab", "rcd", "ra") == expected
    assert difference("rab", "rcd", "ra", first=99) == expected.replace("2", "100", 1)


def test_ranks_that_entered_the_same_units_do_not_differ() -> None:
    assert difference("ra", "rab") == ""
    assert difference("ra", "rb", steps=(7, 8)) == "", "different steps"
    assert difference("", "") == ""
    assert difference("a", "") == "", "no longer known"


def test_the_last_units_of_a_step_are_reported() -> None:
    """Each has the number of its call in the current step."""
    units = RecentUnits()
    for i in range(3 * NUM_RECENT):
        units.add(7, str(i % 50))
    numbers = [call for call, _ in units.of(7)]
    assert numbers == list(range(2 * NUM_RECENT + 1, 3 * NUM_RECENT + 1))
    units.add(8, "a")
    assert units.of(8) == ((1, "a"),)


def silent(rank: int) -> tuple[Report | None, ...]:
    return tuple(None if rank == other else r for other, r in enumerate(DEADLOCK))


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param((None, None), id="no reports"),
        pytest.param(silent(0), id="rank 0 is silent"),
        pytest.param(silent(1), id="rank 1 is silent"),
        pytest.param((DEADLOCK[0], report(*DEADLOCK[1].queues, looks=0)), id="rank 1 just moved"),
        pytest.param((report(*DEADLOCK[0].queues, looks=1), DEADLOCK[1]), id="one look"),
        pytest.param((DEADLOCK[0], report(*DEADLOCK[1].queues, epoch=1)), id="one is ahead"),
        pytest.param(SLOW, id="slow network"),
        pytest.param((SLOW[0], report(queue(3, None), IDLE)), id="slow network, one has ended"),
        pytest.param((SLOW[0], report(queue(3, program(4)), IDLE)), id="slow network, one is next"),
    ],
)
def test_ranks_that_may_still_continue_raise_no_error(reports: Sequence[Report | None]) -> None:
    assert error_of(reports) is None


def test_reports_of_another_epoch_are_ignored() -> None:
    failed = Report(0, LOOKS, 3, "forward", (), "RanksDiverged", "ValueError: it hurts")
    assert error_of(DEADLOCK, epoch=1) is None
    assert error_of((failed, failed), epoch=1) is None


@pytest.mark.parametrize("kind", _ERRORS.values())
def test_an_error_is_relayed_at_once(kind: type[sw.StepError]) -> None:
    store, text = HashStore(), "rank 2 gave up in step 3: ValueError: it hurts"
    failed = Report(0, 0, 3, "forward", (), kind.__name__, text)
    monitor_of(store, 2, size=3).announce(failed)
    for rank in (0, 1):
        with pytest.raises(kind) as found:
            monitor_of(store, rank, size=3).check_reports(epoch=0)
        assert type(found.value) is kind
        assert str(found.value) == text


def test_a_store_that_is_gone_raises_peer_lost() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monitor = monitor_of(TCPStore("127.0.0.1", host.port), 0)
    monitor.publish(SLOW[0])
    del host
    with pytest.raises(sw.PeerLost, match="holds the job's store"):  # noqa: PT012
        monitor.publish(SLOW[0])
        monitor.check_reports(epoch=0)


@given(st.integers(1, 40), st.lists(st.sampled_from(["running", "ended", "next"])))
def test_synchronized_ranks_raise_no_error(at: int, others: list[str]) -> None:
    """All ranks began collective ``at`` and one still runs it, in either queue."""
    num_ranks = 1 + len(others)
    stages = {
        "running": queue(at - 1, program(at, num_ranks)),
        "ended": queue(at, None),
        "next": queue(at, program(at + 1, num_ranks)),
    }
    states = [stages[stage] for stage in ("running", *others)]
    assert error_of([report(state, IDLE) for state in states]) is None
    assert error_of([report(IDLE, state) for state in states]) is None


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_diverged_ranks_always_raise(at: int, peers: int, data: st.DataObject) -> None:
    """One rank waits for another collective than all others."""
    ranks = [report(queue(at - 1, program(at, peers + 1)), IDLE) for _ in range(peers)]
    odd = CollectiveId(at, "reduce elsewhere", 64, tuple(range(peers + 1)))
    ranks.insert(data.draw(st.integers(0, peers)), report(queue(at - 1, odd), IDLE))
    assert isinstance(error_of(ranks), sw.RanksDiverged)
