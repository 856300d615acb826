"""Lanes: jobs in order beside the caller, and nothing kept once they are done."""

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.transport.device import (
    InlineLane,
    Lane,
    Mark,
    ThreadLane,
    local_device,
    make_lane,
    peak_memory_bytes,
)

CPU = torch.device("cpu")
PATIENCE_SECONDS = 5.0


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


def fail() -> None:
    raise ValueError("it hurts")


@pytest.fixture(params=["inline", "thread"])
def lane(request: pytest.FixtureRequest) -> Lane:
    return InlineLane() if request.param == "inline" else ThreadLane("lane of a test")


# -- both ----------------------------------------------------------------------------------------


def test_jobs_run_in_order(lane: Lane) -> None:
    done: list[int] = []
    marks = [lane.submit(lambda number=number: done.append(number)) for number in range(100)]  # type: ignore[misc]
    assert marks[-1].wait(PATIENCE_SECONDS)
    assert done == list(range(100))
    assert all(mark.is_done for mark in marks)
    times = [moment for mark in marks for moment in (mark.started, mark.finished)]
    assert times == sorted(times), "one after the other"


def test_a_mark_says_when_its_job_ran(lane: Lane) -> None:
    before = time.perf_counter()
    mark = lane.submit(lambda: time.sleep(0.02))
    assert mark.wait(PATIENCE_SECONDS)
    assert before <= mark.started <= mark.finished <= time.perf_counter()
    assert mark.finished - mark.started >= 0.02
    assert mark.error is None


def test_an_error_is_carried_by_its_mark_and_the_lane_goes_on(lane: Lane) -> None:
    failing, fine = lane.submit(fail), lane.submit(lambda: None)
    assert failing.wait(PATIENCE_SECONDS), "waiting for it does not raise"
    assert fine.wait(PATIENCE_SECONDS)
    assert isinstance(failing.error, ValueError)
    assert str(failing.error) == "it hurts"
    assert failing.finished >= failing.started > 0
    assert fine.error is None


def test_an_idle_lane_keeps_no_tensor_alive(lane: Lane) -> None:
    gc.disable()
    try:
        tensor: Tensor | None = torch.zeros(3)
        watched = weakref.ref(tensor)

        def job(tensor: Tensor | None = tensor) -> None:
            assert tensor is not None
            tensor.add_(1)

        assert lane.submit(job).wait(PATIENCE_SECONDS)
        del job, tensor
        assert eventually(lambda: watched() is None)
    finally:
        gc.enable()


# -- ThreadLane ----------------------------------------------------------------------------------


def test_a_thread_lane_does_not_block_its_caller() -> None:
    lane = ThreadLane("lane of a test")
    go_on = threading.Event()
    ran_on: list[str] = []

    def job() -> None:
        go_on.wait(PATIENCE_SECONDS)
        ran_on.append(threading.current_thread().name)

    mark = lane.submit(job)
    later = lane.submit(lambda: None)
    assert not mark.wait(0.01)
    assert not mark.is_done
    assert not later.is_done
    go_on.set()
    assert later.wait(PATIENCE_SECONDS)
    assert ran_on == ["lane of a test"]


def test_the_thread_ends_when_the_lane_is_dropped_and_not_before() -> None:
    lane = ThreadLane("lane to drop")
    (thread,) = threads("lane to drop")
    assert thread.daemon, "it never keeps Python from ending"
    assert lane.submit(lambda: None).wait(PATIENCE_SECONDS)
    assert thread.is_alive()
    del lane
    thread.join(PATIENCE_SECONDS)
    assert not threads("lane to drop")


def test_what_was_submitted_still_runs_when_the_lane_is_dropped() -> None:
    lane = ThreadLane("lane to drop")
    go_on = threading.Event()
    ended: list[bool] = []
    lane.submit(lambda: ended.append(go_on.wait(PATIENCE_SECONDS)))
    last = lane.submit(lambda: None)
    del lane
    go_on.set()
    assert last.wait(PATIENCE_SECONDS)
    assert ended == [True]
    assert eventually(lambda: not threads("lane to drop"))


# -- InlineLane and the rest ---------------------------------------------------------------------


def test_an_inline_lane_is_done_at_once_on_the_callers_thread() -> None:
    ran_on: list[threading.Thread] = []
    mark = InlineLane().submit(lambda: ran_on.append(threading.current_thread()))
    assert mark.is_done
    assert mark.wait(0.0)
    assert ran_on == [threading.current_thread()]


def test_a_mark_without_a_job_is_not_done() -> None:
    mark = Mark()
    assert not mark.is_done
    assert not mark.wait(0.0)


def test_the_lane_of_a_cpu_is_a_thread_if_there_is_a_wire() -> None:
    assert isinstance(make_lane(CPU, threaded=True, name="lane of a test"), ThreadLane)
    assert isinstance(make_lane(CPU, threaded=False, name="lane of a test"), InlineLane)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_all_is_on_the_cpu() -> None:
    assert local_device() == CPU


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes(CPU)
    assert 50 << 20 < before < 1 << 40, "torch alone takes more than 50 MiB"
    assert peak_memory_bytes(CPU) >= before
