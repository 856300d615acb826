"""Streams run jobs in order, concurrently with the caller, and keep nothing afterwards."""

import gc
import math
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.api import Work
from shardwise.comm.device import (
    Accelerator,
    CommStream,
    DeviceStream,
    ThreadStream,
    make_current,
    own_device,
    random_states,
    run_together,
    set_random_states,
)
from shardwise.comm.groups import accelerator_type, rank_device
from shardwise.errors import PlanError
from shardwise.features import checks
from shardwise.local_devices import local_device, num_local_accelerators, peak_memory_bytes
from tests.waiting import PATIENCE_SECONDS, eventually

CPU = torch.device("cpu")


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


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


def test_a_work_has_the_times_of_its_job(stream: CommStream) -> None:
    before = time.perf_counter()
    work = stream.submit(lambda: time.sleep(0.02))
    assert work.wait(PATIENCE_SECONDS)
    assert before <= work.span[0] <= work.span[1] <= time.perf_counter()
    assert work.span[1] - work.span[0] >= 0.02
    assert work.error is None


def test_a_work_has_the_error_of_its_job_and_the_stream_continues(stream: CommStream) -> None:
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


def test_a_thread_stream_continues_after_an_error_that_is_no_exception() -> None:
    """Such as a panic in a library that is written in Rust."""
    stream = ThreadStream("stream of a test")

    def panic() -> None:
        raise BaseException("it hurts")  # noqa: TRY002 - on purpose

    failing, fine = stream.submit(panic), stream.submit(lambda: None)
    assert failing.wait(PATIENCE_SECONDS)
    assert str(failing.error) == "it hurts"
    assert fine.wait(PATIENCE_SECONDS)


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


def test_the_thread_ends_when_the_stream_is_freed_and_not_before() -> None:
    stream = ThreadStream("stream to drop")
    (thread,) = threads("stream to drop")
    assert thread.daemon, "it does not keep the process alive"
    assert stream.submit(lambda: None).wait(PATIENCE_SECONDS)
    assert thread.is_alive()
    del stream
    thread.join(PATIENCE_SECONDS)
    assert not threads("stream to drop")


def test_submitted_jobs_still_run_when_the_stream_is_freed() -> None:
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


def test_a_stream_of_the_cpu_runs_jobs_immediately_on_the_callers_thread() -> None:
    ran_on: list[threading.Thread] = []
    work = DeviceStream(CPU).submit(lambda: ran_on.append(threading.current_thread()))
    assert work.done
    assert work.wait(0.0)
    assert ran_on == [threading.current_thread()]


def test_a_work_without_a_job_is_not_done() -> None:
    work = Work()
    assert not work.done
    assert not work.wait(0.0)


class _Clock:
    """Replaces the streams and events of a device; `log` has what was queued."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.time = 0.0  # in milliseconds
        self.num_timed = 0  # events that have times

    def new_event(self, device: torch.device, *, enable_timing: bool = False) -> mock.Mock:
        self.num_timed += enable_timing
        event = mock.Mock(device=device)
        event.query.return_value = False
        event.record.side_effect = lambda stream: self._record(event, stream)
        event.elapsed_time.side_effect = lambda later: later.time - event.time
        return event

    def _record(self, event: mock.Mock, stream: mock.Mock) -> None:
        self.time += 1.0
        event.time = self.time
        self.log.append(("record", stream.name, event.time))

    def stream(self, name: str) -> mock.MagicMock:
        stream = mock.MagicMock()
        stream.name = name
        stream.wait_event.side_effect = lambda event: self.log.append(("wait", name, event.time))
        return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(torch, "Event", clock.new_event)
    monkeypatch.setattr(torch, "Stream", lambda device, **_: clock.stream(f"new of {device}"))
    current = {device: clock.stream(f"current of {device}") for device in ("cuda:0", "xpu:1")}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[str(device)])
    return clock


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("name", ["cuda:0", "xpu:1"])
def test_streams_of_any_accelerator_wait_for_each_other(
    clock: _Clock, name: str, *, is_timed: bool
) -> None:
    """They use the current stream of their own device, which may not be the current device."""
    stream = DeviceStream(torch.device(name))
    clock.log.clear()
    clock.num_timed = 0
    with stream.enqueue(timed=is_timed) as work:
        clock.log.append(("job",))
    assert work.wait(0.0)
    assert clock.num_timed == 2 * is_timed
    assert math.isnan(work.span[1] - work.span[0]) != is_timed
    own, current = f"new of {name}", f"current of {name}"
    end = 3.0 + is_timed
    assert clock.log == [
        ("record", current, 2.0),
        ("wait", own, 2.0),
        *([("record", own, 3.0)] * is_timed),
        ("job",),
        ("record", own, end),
        ("wait", current, end),
    ]


@pytest.mark.usefixtures("clock")
def test_the_host_reads_times_of_a_device_late() -> None:
    before = time.perf_counter()
    with DeviceStream(torch.device("cuda", 0)).enqueue(timed=True) as work:
        pass
    after = time.perf_counter()
    began, ended = work.times
    assert not began.event.synchronize.called  # type: ignore[attr-defined]
    assert before <= work.span[0] - 0.002 <= after, "2 ms after the first event"
    assert work.span[1] - work.span[0] == pytest.approx(0.001)
    assert ended.event.synchronize.called  # type: ignore[attr-defined]


def test_an_error_of_a_job_on_a_device_is_raised_when_the_host_synchronizes(clock: _Clock) -> None:
    failed = DeviceStream(torch.device("cuda", 0)).submit(fail)
    assert failed.wait(0.0), "waiting for it does not raise"
    assert clock.log[-1][:2] == ("wait", "current of cuda:0"), "kernels may be queued"
    with pytest.raises(ValueError, match="it hurts"):
        failed.synchronize()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_all_is_on_the_cpu() -> None:
    assert local_device() == CPU


# -- the device of a rank ------------------------------------------------------------------------


def _with_accelerators(monkeypatch: pytest.MonkeyPatch, kind: str, count: int, current: int) -> Any:
    set_index = mock.Mock()
    accelerator = mock.Mock(
        set_device_index=set_index,
        **{
            "current_accelerator.return_value": torch.device(kind),
            "current_device_index.return_value": current,
            "device_count.return_value": count,
        },
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return set_index


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "expected"),
    [
        (8, 0, 3, 3),
        (1, 0, 3, 0),  # the launcher shows each rank one device
        (4, 0, 6, 2),
        (8, 5, 3, 5),  # the program called `set_device`
    ],
)
def test_each_rank_has_its_own_accelerator(
    monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: int, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    set_index = _with_accelerators(monkeypatch, "cuda", count, current)
    assert own_device() == local_device() == torch.device("cuda", expected)
    set_index.assert_called_once_with(expected)


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_ranks_of_devices_without_collectives_compute_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _with_accelerators(monkeypatch, kind, 1, 0)
    assert local_device() == CPU
    assert num_local_accelerators() == 0


@pytest.mark.parametrize(("current", "sets"), [(0, True), (3, False)])
def test_a_device_is_made_current_if_another_one_is(
    monkeypatch: pytest.MonkeyPatch, current: int, sets: bool
) -> None:
    set_index = _with_accelerators(monkeypatch, "cuda", 8, current)
    make_current(torch.device("cuda", 3))
    make_current(CPU)
    assert set_index.mock_calls == ([mock.call(3)] if sets else [])


def test_actions_that_wait_for_each_other_run_together() -> None:
    met = threading.Barrier(3)
    run_together([met.wait] * 3)
    assert not met.broken


def test_the_device_of_the_group_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_accelerators(monkeypatch, "cuda", 8, 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    bound = mock.Mock(bound_device_id=torch.device("cuda", 6))
    assert rank_device(bound) == torch.device("cuda", 6)
    assert rank_device(mock.Mock(bound_device_id=None)) == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo,xpu:xccl", "xpu"),
        ("hpu:hccl", "hpu"),
        ("cpu:gloo,cuda:gloo", None),
    ],
)
def test_the_backend_determines_the_accelerator_of_a_group(
    monkeypatch: pytest.MonkeyPatch, config: str, expected: str | None
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: config)
    group: Any = object()
    assert accelerator_type(group) == expected
    assert accelerator_type(None) is None


def test_apples_gpu_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = mock.Mock(device=torch.device("mps"))
    monkeypatch.setattr(checks, "named_parameters", lambda *_, **__: [("weight", weight)])
    with pytest.raises(PlanError, match=r"is on mps, where .* no address .*model\.to\('cpu'\)"):
        checks.device_for(nn.Linear(2, 2), mock.Mock(accelerator=None))


def test_random_states_come_from_the_module_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    device = torch.device("xpu", 1)
    states = random_states(device)
    set_random_states(device, states)
    assert states[1] is module.get_rng_state.return_value
    module.set_rng_state.assert_called_once_with(states[1], device)


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes(CPU)
    assert 50 << 20 < before < 1 << 40, "torch alone takes more than 50 MiB"
    assert peak_memory_bytes(CPU) >= before


class TimedEvent:
    """An event that measures times as CUDA does: in float32 milliseconds."""

    now = 0.0  # seconds

    def __init__(self, *_args: object, **_options: object) -> None:
        self.at = 0.0

    def record(self, _stream: object) -> None:
        self.at = TimedEvent.now

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "TimedEvent") -> float:
        return float(torch.tensor((later.at - self.at) * 1e3, dtype=torch.float32))


def test_times_of_a_device_are_precise_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", TimedEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: TimedEvent.now)
    device = Accelerator(torch.device("cuda"))
    stream = device.current_stream()
    for _ in range(5_000):  # steps of 8 s
        TimedEvent.now += 8.0
        began = device.record_time(stream)
        TimedEvent.now += 1e-3
        ended = device.record_time(stream)
    assert float(ended) - float(began) == pytest.approx(1e-3, abs=2e-6)
    assert float(ended) == pytest.approx(TimedEvent.now, abs=1e-2)
