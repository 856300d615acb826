"""C8: when a rank dies, the others notice within seconds and undo the step."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests import ranks
from tests.features.training import SECONDS, Training
from tests.ranks import RankFailed, run_on

RANKS = 3
LAST = RANKS - 1
DEADLINE = 120.0


@pytest.mark.parametrize(("dying", "place"), [(0, "data"), (LAST, "after backward")])
def test_ranks_that_are_left_know_it_soon(
    dying: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 takes the store of the process group with it."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    with pytest.raises(RankFailed) as failure:
        run_on(RANKS, _outlive, dying, place, tmp_path, deadline=DEADLINE)
    assert failure.value.errors == {dying: "was killed by SIGKILL"}


def test_ranks_that_are_left_know_the_exception_that_ended_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    with pytest.raises(RankFailed) as failure:
        run_on(2, _outlive_an_exception, deadline=DEADLINE)
    assert set(failure.value.errors) == {1}, failure.value


def _outlive_an_exception() -> None:
    training = Training()
    training.step()
    if dist.get_rank() == 1:  # as Python does after an exception that nothing catches
        sys.last_value = KeyError("no such sample")
        atexit._run_exitfuncs()
        os._exit(1)
    with pytest.raises(sw.PeerLost) as caught:
        training.step()
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "rank 0 lost rank 1: it closed the connection",
        "rank 1 ended (it was last in step 0, end of the transaction): KeyError: 'no such sample'",
    ]


class Mortal(Training):
    """Its process dies where another's step raises."""

    def body(self, place: str) -> None:
        try:
            super().body(place)
        except ValueError:
            os.kill(os.getpid(), signal.SIGKILL)


def _outlive(dying: int, place: str, folder: Path) -> None:
    training = Mortal()
    training.step()
    before = training.fingerprint()
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(sw.PeerLost):
        training.step(place if dist.get_rank() == dying else "")
    assert training.fingerprint() == before
    done = folder / "done"
    if dist.get_rank() == 1:  # a second attempt fails immediately, without waiting
        with pytest.raises(sw.PeerLost):
            training.step()
        done.touch()
    while not done.exists() and time.monotonic() < began + SECONDS:
        time.sleep(0.05)
    assert time.monotonic() - began < SECONDS, "nobody knew, or the second attempt waited"
