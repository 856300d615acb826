"""Which replicas left and came back, in words."""

import pytest

from shardwise.recording.attendance import Change, changes_of_replicas


def test_each_change_has_a_line_and_all_of_them_have_one() -> None:
    left = Change(left=(1,), joined=(), repeats=1, waited_seconds=2.25, lost_seconds=3.4)
    joined = Change(left=(), joined=(1,), repeats=0, waited_seconds=0.0, lost_seconds=0.5)
    records = [
        {"step": 1, "seconds": 1.0, "goodput": 1.0},
        {"step": 2, "seconds": 5.0, "goodput": 0.5, **vars(left)},
        {"step": 3, "seconds": 6.0, "goodput": 0.5},
        {"step": 6, "seconds": 20.0, "goodput": 0.875, **vars(joined)},
    ]
    waited = "waited 2.2 s for the lighthouse and other replicas"
    assert changes_of_replicas(records) == [
        f"step 2: replica 1 left, repeated once, {waited}; 3.4 s lost",
        "step 6: replica 1 came back after 4 steps, 15 s; 0.5 s lost",
        "replicas: 1 left, 1 joined; 3.9 s and 1 repeated step lost; goodput 87.5%",
    ]
    assert str(left) == f"replica 1 left, repeated once, {waited}; 3.4 s lost"
    assert str(Change(joined=(2, 3), repeats=2)) == (
        "replica 2 joined, replica 3 joined, repeated 2 times; 0.0 s lost"
    )


def test_a_run_without_replicas_has_no_lines() -> None:
    assert not changes_of_replicas([{"step": 1, "seconds": 1.0}])


@pytest.mark.parametrize("joined", [(0,), (2, 3)])
def test_a_replica_that_was_not_there_before_joins(joined: tuple[int, ...]) -> None:
    record = {"step": 4, "seconds": 1.0, "goodput": 1.0, "joined": joined, "lost_seconds": 0.0}
    words = ", ".join(f"replica {number} joined" for number in joined)
    assert changes_of_replicas([record])[0] == f"step 4: {words}; 0.0 s lost"
