"""``python -m benchmarks.host``: the host time of a unit per step, compared with FSDP2.

A GPU is idle if the host does not launch its work in time. This benchmark measures only the host,
on a CPU: units of tiny layers, whose kernels take almost no time, and a process group of any number
of ranks, whose collectives do nothing but are counted. Streams and events, which all engines use,
also do nothing but are counted. shardwise runs as on an accelerator: it orders everything with
events, records events for its ledger, and allocates in the same way. **Not measured: the driver's
part of a call, and the watchdog that shardwise runs with NCCL. Copies, which are asynchronous on a
GPU, run on the host here, and FSDP2's grow with the number of ranks.**

The engines take turns in one process per number of ranks. Times are CPU times, as medians over
rounds.

Columns, per unit and step: *µs* is the sum of *forward*, *backward* and *update* (fused AdamW and
`zero_grad`); *kernels* counts operators that are neither views nor allocations; *allocations*
counts calls of torch's allocator; *stream calls* counts events that are recorded or that a stream
waits for; *syncs* counts calls in which the host would wait for the device.
"""

import gc
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import make_parser, print_figures
from shardwise._private import TorchDispatchMode
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.work import TrainedModel, Work
from shardwise.comm import device as transport_device

BASE = "fsdp2"
COMPARED = ("alone", BASE, "shardwise-fsdp", "shardwise-fsdp-dim")  # rows of `shardwise bench`
WIDTH = 8
WARM_UP = 3  # rounds
CALLS: Counter[str] = Counter()  # calls in this process

_NO_KERNELS = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_",
}
_SYNCS = {  # operators whose result, or its size, the host needs
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = make_parser("host", __doc__, rounds=60)
    parser.add_argument(
        "--ranks", default="8,64,1024,16384", help="numbers of ranks to simulate, comma-separated"
    )
    parser.add_argument("--units", type=int, default=50, help="number of units")
    parser.add_argument("--layers", type=int, default=1, help="layers per unit, with bias")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args(arguments)
    rows: dict[str, Figures] = {}
    for num_ranks in map(int, options.ranks.split(",")):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            rounds, counts = process.submit(measure, num_ranks, options).result()
        for engine in COMPARED:
            ratio = harness.ratio(rounds, engine, BASE)
            rows[f"{num_ranks} ranks: {engine}"] = {
                **harness.medians(rounds, engine),
                **counts[engine],
                "ratio": ratio.median,
                "least_ratio": ratio.least,
                "most_ratio": ratio.most,
            }
    columns = (
        ("µs", "seconds", microseconds),
        (f"/ {BASE}", "ratio", "{:.2f}".format),
        *((name, name, microseconds) for name in ("forward", "backward", "update")),
        *((name.replace("_", " "), name, "{:.1f}".format) for name in COUNTED),
    )
    title = f"host time of a step per unit: {options.units} units, {options.dtype}"
    print_figures(title, columns, rows, options.out, rounds=options.rounds)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


# -- a process that simulates one of many ranks ----------------------------------------------------


def measure(num_ranks: int, options: Namespace) -> tuple[list[Round], dict[str, Figures]]:
    """Return the rounds and each engine's calls in a step, all per unit."""
    torch.set_num_threads(1)
    with simulate_rank_of(num_ranks):
        work = make_work(options)
        trainees = {engine: ENGINES[engine].start(work) for engine in COMPARED}
        batch = work.batch(0, 0)
        cases = {
            engine: partial(time_step, trainee, batch, options.units)
            for engine, trainee in trainees.items()
        }
        gc.freeze()  # otherwise each collection would visit all existing objects
        title = f"{num_ranks} ranks"
        rounds = harness.interleave(cases, options.rounds, title=title, warm_up=WARM_UP)
        counts = {
            engine: count_calls(partial(trainee.step, batch), options.units)
            for engine, trainee in trainees.items()
        }
    return harness.merge([rounds]), counts


def make_work(options: Namespace) -> Work:
    def build() -> nn.Module:
        return nn.Sequential(*(_Unit(options.layers) for _ in range(options.units)))

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randn(1, WIDTH, generator=generator)

    bf16 = options.dtype == "bf16"
    return Work(build, _Unit, draw, lambda model, x: model(x).float().sum(), bf16=bf16)


class _Unit(nn.Sequential):
    def __init__(self, layers: int) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def time_step(trainee: TrainedModel, batch: Tensor, units: int, _number: int = 0) -> Figures:
    """Measure CPU seconds of a step and its parts, per unit; garbage is collected between steps."""
    gc.collect()
    gc.disable()
    times = [time.process_time()]
    loss = trainee.loss(batch)
    times.append(time.process_time())
    loss.backward()  # type: ignore[no-untyped-call]
    times.append(time.process_time())
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    times.append(time.process_time())
    gc.enable()
    forward, backward, update = ((b - a) / units for a, b in pairwise(times))
    return {
        "seconds": forward + backward + update,
        "forward": forward,
        "backward": backward,
        "update": update,
    }


# -- the calls of a step ---------------------------------------------------------------------------

COUNTED = ("operators", "kernels", "allocations", "collectives", "stream_calls", "syncs")


def count_calls(step: Callable[[], object], units: int) -> Figures:
    CALLS.clear()
    with _Operators():  # type: ignore[no-untyped-call]
        step()
    counts = Counter(CALLS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    memory = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    counts["allocations"] = sum(event.nbytes() > 0 for event in memory)
    return {name: counts[name] / units for name in COUNTED}


def is_free(func: Any) -> bool:
    """Whether an operator launches no kernel: a view, or an allocation."""
    return bool(func.is_view) or func._schema.name in _NO_KERNELS


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not nn.Parameter for kind in types):
            return NotImplemented  # a DTensor; operators on its local tensors also arrive here
        name = func._schema.name
        CALLS["operators"] += 1
        CALLS["kernels"] += not is_free(func)
        CALLS["syncs"] += name in _SYNCS
        return func(*args, **(kwargs or {}))


# -- simulated ranks and streams -------------------------------------------------------------------


@contextmanager
def simulate_rank_of(num_ranks: int) -> Iterator[None]:
    """Simulate rank 0 of ``num_ranks`` on an "accelerator" that uses host memory."""
    backend = dist.Backend._BackendPlugin(
        lambda options, _: _Group(options.group_rank, options.group_size),  # type: ignore[call-arg]
        extended_api=True,
    )
    backends = mock.patch.dict(dist.Backend._plugins, {"FAKE": backend})
    kinds = {"cpu": _Accelerator}
    streams: dict[str, Any] = {"Stream": _Stream, "Event": _Event, "_current_stream": _Stream()}
    accelerator = mock.patch.dict(transport_device.KINDS, kinds)
    used = mock.patch.dict(transport_device._used_streams, clear=True)  # of earlier simulations
    with backends, accelerator, used, mock.patch.multiple(torch.cpu, **streams):
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        yield
        dist.destroy_process_group()


class _Group(dist.ProcessGroup):
    def launched(self, num_bytes: int, *, times: int = 1) -> None:  # noqa: ARG002
        """Count a collective that sends ``num_bytes`` several ``times``."""
        CALLS["collectives"] += 1

    def all_gather_single(self, whole: Tensor, *_args: object) -> "_Done":
        self.launched(whole.nbytes)
        return _Done()

    def reduce_scatter_single(self, _part: Tensor, whole: Tensor, *_args: object) -> "_Done":
        self.launched(whole.nbytes)
        return _Done()

    def allreduce(self, tensors: list[Tensor], *_args: object) -> "_Done":  # type: ignore[override]
        self.launched(tensors[0].nbytes, times=2)
        return _Done()

    def barrier(self, *_args: object, **_options: object) -> "_Done":
        return _Done()

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return "fake"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name


class _Done(dist.Work):
    def wait(self, *_args: object) -> bool:
        return True


class _Event:
    def record(self, _stream: object = None) -> None:
        CALLS["stream_calls"] += 1

    def wait(self, _stream: object = None) -> None:
        CALLS["stream_calls"] += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        CALLS["syncs"] += 1

    def elapsed_time(self, _other: object) -> float:
        return 0.0


class _Stream:
    def __init__(self, priority: int = 0) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = _Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, _event: _Event) -> None:
        CALLS["stream_calls"] += 1

    def wait_stream(self, _other: object) -> None:
        CALLS["stream_calls"] += 2  # records an event and waits for it

    def synchronize(self) -> None:
        CALLS["syncs"] += 1


class _Accelerator(transport_device.Accelerator):
    """`Accelerator` with the streams of this file, which FSDP2 also gets from `torch.cpu`."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._origin: Any = _Event()
        self._origin_seconds = 0.0

    def new_stream(self) -> Any:
        return torch.cpu.Stream()

    @staticmethod
    def current_stream_of(device: torch.device) -> Any:
        return torch.cpu.current_stream(device)

    def use(self, stream: Any) -> Any:
        return torch.cpu.stream(stream)

    def record(self, stream: Any) -> Any:
        event: Any = _Event()
        event.record(stream)
        return transport_device.StreamEvent(event)

    def record_time(self, stream: Any) -> Any:
        return self.record(stream)


if __name__ == "__main__":
    main()
