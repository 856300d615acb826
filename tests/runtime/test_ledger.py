"""The records of steps: how long they are kept, and the numbers computed from them."""

import pytest

from shardwise.comm.api import Work
from shardwise.runtime.ledger import Ledger, Record
from shardwise.schedule.events import Event, EventKind

UNITS = [*"abcdefgh", "before", "by hand", *(f"step {step}" for step in range(6))]


def mark(started: float, finished: float) -> Work:
    made = Work()
    made.times = (started, finished)
    return made


def record(
    kind: EventKind, began: float, ended: float, *marks: Work, unit: str = "a", num_bytes: int = 0
) -> Record:
    return Record(Event(kind, UNITS.index(unit), num_bytes), 0, began, ended, marks)


def ledger_of(*records: Record) -> Ledger:
    """One complete step."""
    ledger = Ledger(UNITS)
    for each in records:
        ledger.append(each)
    ledger.begin_step()
    return ledger


def units_of(events: list[Event]) -> list[str]:
    return [UNITS[event.unit] for event in events]


def gathers(ledger: Ledger, *units: str) -> None:
    for unit in units:
        ledger.append(record(EventKind.GATHER, 0.0, 0.0, unit=unit, num_bytes=100))


def frees(ledger: Ledger, *units: str) -> None:
    for unit in units:
        ledger.append(record(EventKind.FREE, 0.0, 0.0, unit=unit, num_bytes=100))


# -- steps ---------------------------------------------------------------------------------------


def test_the_last_complete_step_is_the_default() -> None:
    ledger = Ledger(UNITS)
    gathers(ledger, "a", "b")
    ledger.begin_step()
    gathers(ledger, "c")
    assert ledger.step == 1
    assert units_of(ledger.events()) == ["a", "b"]
    assert ledger.events() == ledger.events(0)
    assert ledger.names(1) == ["gather c"], "the one under way"
    ledger.begin_step()
    assert units_of(ledger.events()) == ["c"]


def test_only_the_last_steps_are_kept() -> None:
    ledger = Ledger(UNITS, max_steps=3)
    for step in range(6):
        gathers(ledger, f"step {step}")
        ledger.begin_step()
    assert ledger.step == 6
    assert {step: units_of(ledger.events(step)) for step in (4, 5, 6)} == {
        4: ["step 4"],
        5: ["step 5"],
        6: [],
    }


@pytest.mark.parametrize("step", [0, 3, 7, -2])
def test_another_step_is_refused_with_those_that_are_kept(step: int) -> None:
    ledger = Ledger(UNITS, max_steps=3)
    for _ in range(6):
        ledger.begin_step()
    message = f"^step {step} is not in the ledger, which keeps steps 4 to 6$"
    with pytest.raises(IndexError, match=message):
        ledger.records(step)


def test_before_the_first_step_has_ended_there_is_no_last_one() -> None:
    with pytest.raises(IndexError, match="no step has ended yet"):
        Ledger(UNITS).events()


def test_what_is_handed_out_is_a_copy() -> None:
    ledger = ledger_of(record(EventKind.FORWARD, 0.0, 0.0))
    ledger.records().clear()
    assert len(ledger.records()) == 1


def test_a_forward_without_a_backward_is_kept_until_the_next_forward() -> None:
    ledger = Ledger(UNITS)
    gathers(ledger, "by hand")
    for is_trained, unit in [(True, "a"), (False, "b"), (False, "c"), (True, "d"), (False, "e")]:
        ledger.begin_forward()
        gathers(ledger, unit)
        ledger.end_forward(awaits_backward=is_trained)
    assert units_of(ledger.events(0)) == ["by hand", "a", "d", "e"]
    ledger.begin_step()
    ledger.begin_forward()
    assert ledger.events(1) == []


def test_forwards_that_no_backward_follows_are_forgotten() -> None:
    ledger = Ledger(UNITS)
    for _ in range(300):
        ledger.begin_forward()
        gathers(ledger, *"abcdefgh" * 10)
        ledger.end_forward(awaits_backward=True)
    assert len(ledger.records(0)) < 300 * 80


# -- gathered bytes ------------------------------------------------------------------------------


def test_the_peak_is_of_all_steps() -> None:
    ledger = Ledger(UNITS, max_steps=1)
    gathers(ledger, "a", "b", "c")
    frees(ledger, "a", "b")
    assert (ledger.gathered_bytes, ledger.peak_gathered_bytes()) == (100, 300)
    ledger.begin_step()
    gathers(ledger, "a")
    frees(ledger, "a", "c")
    ledger.begin_step()
    assert (ledger.gathered_bytes, ledger.peak_gathered_bytes()) == (0, 300)


def test_an_abandoned_step_leaves_no_records_and_nothing_gathered() -> None:
    ledger = ledger_of(record(EventKind.FORWARD, 0.0, 0.0, unit="before"))
    gathers(ledger, "a", "b")
    ledger.abandon_step()
    assert ledger.step == 1, "it is tried again under the same number"
    assert ledger.records(1) == []
    assert units_of(ledger.events()) == ["before"]
    assert (ledger.gathered_bytes, ledger.peak_gathered_bytes()) == (0, 200)
    gathers(ledger, "c")
    ledger.begin_step()
    assert units_of(ledger.events()) == ["c"]


# -- overlap -------------------------------------------------------------------------------------


def test_busy_seconds_are_those_of_all_marks() -> None:
    gather = record(EventKind.GATHER, 0.0, 0.1, mark(0.0, 1.5), mark(2.0, 2.5))
    assert gather.busy_seconds == 2.0
    assert record(EventKind.WAIT, 0.0, 1.0).busy_seconds == 0.0


@pytest.mark.parametrize(
    ("waits", "share"),
    [([], 1.0), ([0.0], 1.0), ([1.0], 0.75), ([1.0, 2.0], 0.25), ([4.0], 0.0), ([9.0], 0.0)],
)
def test_overlapped_is_what_compute_did_not_wait_for(waits: list[float], share: float) -> None:
    ledger = ledger_of(
        record(EventKind.GATHER, 0.0, 0.0, mark(0.0, 1.0), mark(1.0, 2.0)),
        record(EventKind.GATHER, 0.0, 0.0, mark(5.0, 7.0), unit="b"),
        record(EventKind.FORWARD, 3.0, 3.0),
        *(record(EventKind.WAIT, 10.0, 10.0 + seconds) for seconds in waits),
        # Neither a reduction nor the wait for its end is a gather.
        record(EventKind.REDUCE, 20.0, 20.0, mark(20.0, 90.0)),
        record(EventKind.FINISH_REDUCE, 30.0, 90.0),
    )
    assert ledger.overlapped_share() == pytest.approx(share)


def test_without_gathers_all_is_overlapped() -> None:
    assert ledger_of(record(EventKind.WAIT, 0.0, 0.0)).overlapped_share() == 1.0
    assert ledger_of().overlapped_share() == 1.0


def test_overlap_is_of_the_step_that_is_asked_for() -> None:
    ledger = ledger_of(record(EventKind.GATHER, 0.0, 0.0, mark(0.0, 1.0)))
    ledger.append(record(EventKind.GATHER, 0.0, 0.0, mark(0.0, 1.0)))
    ledger.append(record(EventKind.WAIT, 0.0, 0.5))
    ledger.begin_step()
    assert (ledger.overlapped_share(0), ledger.overlapped_share(1)) == (1.0, 0.5)
