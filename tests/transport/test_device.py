"""CommStreams: jobs in order beside the caller, and nothing kept once they are done."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.transport.api import Work
from shardwise.transport.device import (
    CommStream,
    DeviceStream,
    ThreadStream,
    local_device,
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


@pytest.fixture(params=["device", "thread"])
def stream(request: pytest.FixtureRequest) -> CommStream:
    return DeviceStream(CPU) if request.param == "device" else ThreadStream("stream of a test")


# -- both ----------------------------------------------------------------------------------------


def test_jobs_run_in_order(stream: CommStream) -> None:
    done: list[int] = []
    works = [stream.submit(lambda number=number: done.append(number)) for number in range(100)]  # type: ignore[misc]
    assert works[-1].wait(PATIENCE_SECONDS)
    assert done == list(range(100))
    assert all(work.done for work in works)
    times = [moment for work in works for moment in work.span]
    assert times == sorted(times), "one after the other"


def test_a_work_says_when_its_job_ran(stream: CommStream) -> None:
    before = time.perf_counter()
    work = stream.submit(lambda: time.sleep(0.02))
    assert work.wait(PATIENCE_SECONDS)
    assert before <= work.span[0] <= work.span[1] <= time.perf_counter()
    assert work.span[1] - work.span[0] >= 0.02
    assert work.error is None


def test_an_error_is_carried_by_its_work_and_the_stream_goes_on(stream: CommStream) -> None:
    failing, fine = stream.submit(fail), stream.submit(lambda: None)
    assert failing.wait(PATIENCE_SECONDS), "waiting for it does not raise"
    assert fine.wait(PATIENCE_SECONDS)
    assert isinstance(failing.error, ValueError)
    assert str(failing.error) == "it hurts"
    assert failing.span[1] >= failing.span[0] > 0
    assert fine.error is None


def test_an_idle_stream_keeps_no_tensor_alive(stream: CommStream) -> None:
    gc.disable()
    try:
        tensor: Tensor | None = torch.zeros(3)
        watched = weakref.ref(tensor)

        def job(tensor: Tensor | None = tensor) -> None:
            assert tensor is not None
            tensor.add_(1)

        assert stream.submit(job).wait(PATIENCE_SECONDS)
        del job, tensor
        assert eventually(lambda: watched() is None)
    finally:
        gc.enable()


# -- ThreadStream ----------------------------------------------------------------------------------


def test_a_thread_stream_does_not_block_its_caller() -> None:
    stream = ThreadStream("stream of a test")
    go_on = threading.Event()
    ran_on: list[str] = []

    def job() -> None:
        go_on.wait(PATIENCE_SECONDS)
        ran_on.append(threading.current_thread().name)

    work = stream.submit(job)
    later = stream.submit(lambda: None)
    assert not work.wait(0.01)
    assert not work.done
    assert not later.done
    go_on.set()
    assert later.wait(PATIENCE_SECONDS)
    assert ran_on == ["stream of a test"]


def test_the_thread_ends_when_the_stream_is_dropped_and_not_before() -> None:
    stream = ThreadStream("stream to drop")
    (thread,) = threads("stream to drop")
    assert thread.daemon, "it never keeps Python from ending"
    assert stream.submit(lambda: None).wait(PATIENCE_SECONDS)
    assert thread.is_alive()
    del stream
    thread.join(PATIENCE_SECONDS)
    assert not threads("stream to drop")


def test_what_was_submitted_still_runs_when_the_stream_is_dropped() -> None:
    stream = ThreadStream("stream to drop")
    go_on = threading.Event()
    ended: list[bool] = []
    stream.submit(lambda: ended.append(go_on.wait(PATIENCE_SECONDS)))
    last = stream.submit(lambda: None)
    del stream
    go_on.set()
    assert last.wait(PATIENCE_SECONDS)
    assert ended == [True]
    assert eventually(lambda: not threads("stream to drop"))


# -- DeviceStream and the rest ---------------------------------------------------------------------


def test_a_stream_of_the_cpu_runs_jobs_at_once_on_the_callers_thread() -> None:
    ran_on: list[threading.Thread] = []
    work = DeviceStream(CPU).submit(lambda: ran_on.append(threading.current_thread()))
    assert work.done
    assert work.wait(0.0)
    assert ran_on == [threading.current_thread()]


def test_a_work_without_a_job_is_not_done() -> None:
    work = Work()
    assert not work.done
    assert not work.wait(0.0)


def test_a_device_stream_waits_for_the_current_stream_of_its_own_device() -> None:
    """Another device may be current."""
    device, current = torch.device("cuda", 1), mock.MagicMock()
    with mock.patch.multiple(
        torch.cuda,
        Stream=mock.MagicMock(),
        Event=mock.MagicMock(),
        stream=mock.MagicMock(),
        current_stream=current,
    ):
        stream = DeviceStream(device)
        work = stream.submit(lambda: None)
        work.wait_on_device()
        assert current.call_args_list == [mock.call(device)] * 2
        failed = stream.submit(fail)
        assert failed.wait(0.0), "its error is raised by whoever waits"
        with pytest.raises(ValueError, match="it hurts"):
            failed.synchronize()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_all_is_on_the_cpu() -> None:
    assert local_device() == CPU


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes(CPU)
    assert 50 << 20 < before < 1 << 40, "torch alone takes more than 50 MiB"
    assert peak_memory_bytes(CPU) >= before
