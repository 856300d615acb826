"""What ranks conclude from each other's reports: when to give up, and with which words."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.transport.health.status import (
    BEATS,
    TRAIL_LENGTH,
    Board,
    LinkState,
    Report,
    Scope,
    Ticket,
    Topology,
    Trail,
    verdict,
)

counts = st.integers(0, 1 << 40)
texts = st.text(max_size=20)
tickets = st.builds(Ticket, number=counts, label=texts, slot_bytes=counts)
link_states = st.builds(
    LinkState,
    issued=counts,
    running=st.none() | tickets,
    ended=st.lists(tickets.map(lambda ticket: ticket.tag), max_size=16).map(tuple),
)
reports = st.builds(
    Report,
    epoch=counts,
    beat=counts,
    step=counts,
    where=texts,
    links=st.lists(link_states, max_size=2).map(tuple),
    error=st.none() | texts,
    diverged=st.booleans(),
    num_entered=counts,
    entered=st.lists(texts, max_size=3).map(tuple),
    lost=st.booleans(),
)


def program(number: int) -> Ticket:
    """The ``number``-th ticket of a link whose ranks agree."""
    return Ticket(number, f"gather layers.{number}", 64)


def link(ended: int, running: Ticket | None) -> LinkState:
    """A link whose first ``ended`` tickets ended."""
    tags = tuple(program(number).tag for number in range(1, ended + 1))
    return LinkState(ended + (running is not None), running, tags[-16:])


def report(*links: LinkState, beat: int = BEATS, epoch: int = 0, step: int = 7) -> Report:
    return Report(epoch, beat, step, "forward of layers.0", links)


IDLE = link(0, None)
# Rank 0 asks for one unit where rank 1 asks for another.
DEADLOCK = (
    report(link(2, Ticket(3, "gather a", 64)), IDLE),
    report(link(2, Ticket(3, "gather b", 64)), IDLE),
)
# Both wait for the same one: the wire is slow.
SLOW = (report(link(2, program(3)), IDLE), report(link(2, program(3)), IDLE))


# -- tickets and links ---------------------------------------------------------------------------


def test_tags_tell_tickets_apart() -> None:
    different = [
        Ticket(number, label, slot_bytes)
        for number in range(1, 20)
        for label in ("gather a", "gather b", "reduce a", "gather a 1")
        for slot_bytes in (0, 16, 64)
    ]
    assert len({ticket.tag for ticket in different}) == len(different)


@given(tickets)
def test_a_tag_is_the_same_everywhere_and_fits_the_wire(ticket: Ticket) -> None:
    same = Ticket(ticket.number, ticket.label, ticket.slot_bytes)
    assert ticket.tag == same.tag
    assert 0 <= ticket.tag < 1 << 31


def test_a_link_took_what_runs_and_what_ended() -> None:
    state = link(2, program(3))
    assert [state.took(program(number)) for number in range(1, 5)] == [True, True, True, False]
    assert not state.took(Ticket(3, "gather layers.9", 64)), "another label"
    assert not state.took(Ticket(3, "gather layers.3", 32)), "another size"
    assert not link(2, None).took(program(3))


# -- reports -------------------------------------------------------------------------------------


@given(reports)
def test_a_report_survives_the_way_through_the_store(original: Report) -> None:
    text = original.to_json()
    assert Report.from_json(text) == original
    assert Report.from_json(text.encode()) == original


def test_the_board_shows_the_last_report_of_each_rank() -> None:
    store = HashStore()
    boards = [Board(store, "group", rank, 3) for rank in range(3)]
    other = Board(store, "another group", 0, 3)
    assert boards[0].read() == [None, None, None]
    boards[0].post(DEADLOCK[0])
    boards[2].post(SLOW[0])
    boards[2].post(SLOW[1])
    assert [board.read() for board in boards] == [[DEADLOCK[0], None, SLOW[1]]] * 3
    assert other.read() == [None, None, None]


# -- verdicts ------------------------------------------------------------------------------------


def test_a_deadlock_is_told_with_the_place_of_every_rank() -> None:
    error = verdict(DEADLOCK, epoch=0)
    assert isinstance(error, sw.RanksDiverged)
    assert "rank 0: step 7, forward of layers.0" in str(error)
    assert "rank 1: step 7, forward of layers.0" in str(error)
    assert "same units in the same order" in str(error)


def test_a_rank_that_never_took_the_ticket_is_a_deadlock() -> None:
    """It waits on the other link, for something that the first rank never launched."""
    waits_for_gather = report(link(2, program(3)), link(1, None))
    waits_for_reduce = report(link(2, None), link(1, program(2)))
    assert isinstance(verdict((waits_for_gather, waits_for_reduce), 0), sw.RanksDiverged)


def test_ranks_that_wait_for_nothing_at_all_are_a_deadlock() -> None:
    assert isinstance(verdict((report(IDLE, IDLE), report(IDLE, IDLE)), 0), sw.RanksDiverged)


def test_a_rank_that_waits_for_one_that_waits_in_vain_is_stuck_too() -> None:
    """Two replicas of two shards; rank 3 goes elsewhere. Ranks 0 and 1 have done with each other
    and wait for 2 and 3; 2 waits for 3.
    """
    in_row, in_column = (
        Ticket(n, "reduce a", 64, s) for n, s in ((3, Scope.ROW), (4, Scope.COLUMN))
    )
    first = report(IDLE, LinkState(4, in_row, ()))
    second = report(IDLE, LinkState(4, in_column, (in_row.tag,)))
    done = report(IDLE, LinkState(4, None, (in_row.tag, in_column.tag)))
    elsewhere = report(link(2, Ticket(3, "gather b", 64)), link(2, None))
    topology = Topology(((0, 1), (2, 3)))
    stuck = verdict([second, second, first, elsewhere], 0, topology)
    assert isinstance(stuck, sw.RanksDiverged)
    assert verdict([second, second, first, first], 0, topology) is None
    assert verdict([second] * 4, 0, topology) is None
    assert verdict([second, second, done, second], 0, topology) is None


# -- where they parted ---------------------------------------------------------------------------


def trail(*units: str, step: int = 7) -> Trail:
    made = Trail()
    for unit in units:
        made.append(step, unit)
    return made


def parted(*trails: Trail, steps: tuple[int, ...] = (7, 7, 7)) -> str:
    """What the verdict says of ranks in a deadlock that came by these ways."""
    states = [report(link(2, Ticket(3, f"gather {i}", 64)), IDLE) for i in range(len(trails))]
    reports = [
        replace(state, step=step, num_entered=way.num_entered, entered=way.entered)
        for state, step, way in zip(states, steps, trails, strict=False)
    ]
    lines = str(verdict(reports, epoch=0)).splitlines()
    return next((line for line in lines if line.startswith("They parted")), "")


def test_the_first_units_in_which_ranks_differ_are_named() -> None:
    assert parted(trail("root", "a", "b"), trail("root", "c", "d"), trail("root", "a")) == (
        "They parted at call 2 of the step: rank 0, 2 entered a; rank 1 entered c."
    )


def test_ways_that_do_not_part_are_not_spoken_of() -> None:
    assert parted(trail("root", "a"), trail("root", "a", "b")) == ""
    assert parted(trail("root", "a"), trail("root", "b"), steps=(7, 8)) == "", "different steps"
    assert parted(trail(), trail()) == ""


def test_a_trail_keeps_the_end_of_one_step() -> None:
    long = [str(i % 50) for i in range(3 * TRAIL_LENGTH)]
    assert trail(*long).entered == tuple(long[-TRAIL_LENGTH:])
    call = len(long) + 1
    assert parted(trail(*long, "a"), trail(*long, "b", "c")) == (
        f"They parted at call {call} of the step: rank 0 entered a; rank 1 entered b."
    )
    assert parted(trail("a"), trail("b", *long)) == "", "too long ago to tell"
    made = trail("a", "b")
    made.append(8, "c")
    assert (made.entered, made.num_entered) == (("c",), 1)


def silent(rank: int) -> tuple[Report | None, ...]:
    return tuple(None if rank == other else r for other, r in enumerate(DEADLOCK))


@pytest.mark.parametrize(
    "hopeful",
    [
        pytest.param((None, None), id="nobody spoke"),
        pytest.param(silent(0), id="rank 0 is silent"),
        pytest.param(silent(1), id="rank 1 is silent"),
        pytest.param((DEADLOCK[0], report(*DEADLOCK[1].links, beat=0)), id="rank 1 just moved"),
        pytest.param((report(*DEADLOCK[0].links, beat=1), DEADLOCK[1]), id="one beat"),
        pytest.param((DEADLOCK[0], report(*DEADLOCK[1].links, epoch=1)), id="one is ahead"),
        pytest.param(SLOW, id="slow wire"),
        pytest.param((SLOW[0], report(link(3, None), IDLE)), id="slow wire, one is through"),
        pytest.param((SLOW[0], report(link(3, program(4)), IDLE)), id="slow wire, one is on"),
    ],
)
def test_there_is_hope(hopeful: Sequence[Report | None]) -> None:
    assert verdict(hopeful, epoch=0) is None


def test_reports_of_another_epoch_count_for_nothing() -> None:
    failed = Report(0, BEATS, 3, "forward", (), error="ValueError: it hurts", diverged=True)
    assert verdict(DEADLOCK, epoch=1) is None
    assert verdict((failed, failed), epoch=1) is None


def test_an_error_is_told_at_once_with_rank_and_step() -> None:
    failed = Report(0, 0, 3, "forward", (), error="ValueError: it hurts")
    error = verdict((None, SLOW[1], failed), epoch=0)
    assert isinstance(error, sw.PeerAborted)
    assert str(error) == "rank 2 gave up in step 3: ValueError: it hurts"


def test_a_divergence_is_told_in_the_same_words_everywhere() -> None:
    """Whoever sees it first posts it; the others repeat that, wherever they have come meanwhile."""
    found = verdict(DEADLOCK, epoch=0)
    posted = Report(0, 0, 7, "elsewhere", (), error=str(found), diverged=True)
    for seen in [(posted, DEADLOCK[1]), (DEADLOCK[0], posted), (posted, None), (posted, posted)]:
        repeated = verdict(seen, epoch=0)
        assert isinstance(repeated, sw.RanksDiverged)
        assert str(repeated) == str(found)


def test_a_loss_stays_a_loss() -> None:
    posted = Report(0, 0, 7, "forward", (), error="rank 1 lost rank 2", lost=True)
    error = verdict((posted, None, None), epoch=0)
    assert isinstance(error, sw.PeerLost)
    assert str(error) == "rank 1 lost rank 2"


def test_a_store_that_is_gone_counts_as_a_loss() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(TCPStore("127.0.0.1", host.port), "group", 0, 2)
    board.post(SLOW[0])
    del host
    with pytest.raises(sw.PeerLost, match="holds the job's store"):  # noqa: PT012
        board.post(SLOW[0])
        board.read()


@given(st.integers(1, 40), st.lists(st.sampled_from(["at it", "through", "next"])))
def test_ranks_in_step_never_despair(at: int, others: list[str]) -> None:
    """All ranks took ticket ``at`` and one is still at it, whichever link it is of."""
    stages = {
        "at it": link(at - 1, program(at)),
        "through": link(at, None),
        "next": link(at, program(at + 1)),
    }
    states = [stages[stage] for stage in ("at it", *others)]
    assert verdict([report(state, IDLE) for state in states], epoch=0) is None
    assert verdict([report(IDLE, state) for state in states], epoch=0) is None


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_ranks_out_of_step_always_end(at: int, peers: int, data: st.DataObject) -> None:
    """One rank waits for something else than all others, at the same place."""
    ranks = [report(link(at - 1, program(at)), IDLE) for _ in range(peers)]
    odd = Ticket(at, "reduce elsewhere", 64)
    ranks.insert(data.draw(st.integers(0, peers)), report(link(at - 1, odd), IDLE))
    assert isinstance(verdict(ranks, epoch=0), sw.RanksDiverged)
