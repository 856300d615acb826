"""C8: when a rank dies, the others notice within seconds and undo the step."""

import atexit
import os
import signal
import sys
import time
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

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
    assert failure.value.headlines == {dying: "was killed by SIGKILL"}


@pytest.mark.parametrize("way", ["program", "process", "exit"])
def test_ranks_that_are_left_know_the_exception_that_ended_one(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised out of a program, or of a process of `multiprocessing`, or makes one exit."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    with pytest.raises(RankFailed) as failure:
        run_on(2, _outlive_an_exception, way, deadline=DEADLINE)
    assert set(failure.value.errors) == {1}, failure.value


def _outlive_an_exception(way: str) -> None:
    training = Training()
    training.step()
    if dist.get_rank() == 1:
        _end_as_python_does(way)
    with pytest.raises(sw.PeerLost) as caught:
        training.step()
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "rank 0 lost rank 1: it closed the connection",
        "rank 1 ended (it was last in step 0, end of the transaction): KeyError: 'no such sample'",
    ]


def _end_as_python_does(way: str) -> None:
    error = KeyError("no such sample")
    try:
        if way == "program":
            sys.last_value = error
            atexit._run_exitfuncs()
        elif way == "process":  # up to Python 3.12
            raise error
        else:
            try:
                raise error
            except KeyError:
                sys.exit(1)
    finally:
        util._exit_function()  # type: ignore[attr-defined]
        os._exit(1)


@pytest.mark.parametrize("way", ["exit", "destroy"])
def test_a_rank_that_has_fewer_batches_is_not_a_lost_connection(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves by the end of its program, or by destroying its process group first."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    with pytest.raises(RankFailed) as failure:
        run_on(3, _outlive_a_shorter_loop, way, deadline=DEADLINE)
    assert set(failure.value.errors) == {2}, failure.value


def _outlive_a_shorter_loop(way: str) -> None:
    model: Any = sw.fully_shard(nn.Linear(4, 4))
    is_short = dist.get_rank() == 2
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    if is_short:
        if way == "destroy":
            dist.destroy_process_group()
            del model
        atexit._run_exitfuncs()
        os._exit(0)
    with pytest.raises(sw.StepError) as caught:
        model(torch.ones(2, 4)).sum().backward()
    text = str(caught.value)
    assert "rank 2 ended after step 2 without an uncaught exception: unless its output" in text
    assert "it had fewer batches than the others" in text
    assert "drop_last=True" in text
    assert "sw.join" in text
    assert "connection" not in text


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
