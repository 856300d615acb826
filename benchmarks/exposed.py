"""``python -m benchmarks.exposed``: communication that compute would wait for on H100s.

Each engine runs forward and backward of a small GPT on the CPU, on the streams and ranks of
`benchmarks.host`. Every kernel and collective that it launches is recorded, with its stream and its
dependencies. The recorded graph is then replayed with the durations that a GPT with all sizes
`SCALE` times larger would have on an H100: products take `SCALE` cubed times their FLOPs, all other
kernels `SCALE` squared times their bytes. So **this is a calculation, not a measurement on a GPU**:
it shows what the order of launches and waits allows. It assumes that the host is always fast enough
and that collectives do not slow kernels down.

Collectives of one communicator run in launch order. Collectives of two communicators share the
network: one at a time, first come, first served. *Exposed* is the step time minus the step time
with collectives that take no time. *Overhead* is the latter minus the time of the model without an
engine.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from benchmarks import host, make_parser, print_figures
from shardwise._private import TorchDispatchMode, pytree
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.features import fused_wgrad
from shardwise.train.model import gpt_shape

SCALE = 32
GPT = gpt_shape(vocabulary=50_176, context=2048, width=4096, layers=32, heads=32)  # 6.6 billion
COMPARED = (
    "alone-bf16",
    "fsdp2",
    "shardwise-fsdp",
    "shardwise-fsdp-shared",  # gathers and reductions in one communicator
    "shardwise-fsdp-dim",
)
WARM_UP = 3  # steps

# H100 SXM: rate of the best measured matrix product, and memory bandwidth.
FLOPS_PER_SECOND = 794.5e12
BYTES_PER_SECOND = 3352e9
KERNEL_SECONDS = 3e-6  # minimum time of a kernel
COLLECTIVE_SECONDS = 20e-6  # minimum time of a collective
# Bytes per second between neighbors: 80 % of NVLink or of a node's 3,200 Gbit/s; of 800 Gbit/s.
NETWORKS = {"360 GB/s": 360e9, "80 GB/s": 80e9}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
# Operator -> number of products, and position of the queries among its arguments.
_PRODUCTS = {_ATTENTION: (2, 0), f"{_ATTENTION}_backward": (5, 1)}


@dataclass(slots=True)
class Task:
    """One kernel or collective."""

    seconds: float
    after: set[int]  # numbers of the tasks that it depends on
    sent_bytes: float = 0.0  # for collectives


@dataclass(slots=True)
class Graph:
    """The tasks that a step launches, in launch order."""

    tasks: list[Task] = field(default_factory=list)
    last_of: dict[int, int] = field(default_factory=dict)  # the last task of each communicator

    def launch(self, task: Task) -> None:
        stream: Any = torch.cpu.current_stream()
        task.after |= stream.reached
        stream.reached = {len(self.tasks)}
        self.tasks.append(task)

    def launch_collective(self, group: "_Group", num_bytes: int, times: int = 1) -> None:
        sent = times * num_bytes * SCALE**2 * (group.size() - 1) / group.size()
        before = self.last_of.get(id(group))
        self.last_of[id(group)] = len(self.tasks)
        self.launch(Task(0.0, set() if before is None else {before}, sent))

    def forget_times(self) -> None:
        """Set the time of all tasks launched so far to zero."""
        for task in self.tasks:
            task.seconds = task.sent_bytes = 0.0

    def play(self, bytes_per_second: float | None) -> float:
        """Return the seconds until all tasks are done; with None, collectives take no time."""
        waiting = [len(task.after) for task in self.tasks]
        followers: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            for before in task.after:
                followers[before].append(number)
        begins = [0.0] * len(self.tasks)
        ready = [(0.0, number) for number, count in enumerate(waiting) if not count]
        network_is_free = latest = 0.0
        while ready:
            now, number = heapq.heappop(ready)
            task = self.tasks[number]
            if task.sent_bytes and bytes_per_second is not None:
                seconds = COLLECTIVE_SECONDS + task.sent_bytes / bytes_per_second
                now = network_is_free = max(now, network_is_free) + seconds
            else:
                now += task.seconds
            latest = max(latest, now)
            for follower in followers[number]:
                begins[follower] = max(begins[follower], now)
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (begins[follower], follower))
        return latest


GRAPH = Graph()  # the graph under recording


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, record, print."""
    parser = make_parser("exposed", __doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=GPT.layers)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    options = parser.parse_args(arguments)
    small = gpt_shape(
        GPT.vocab // SCALE, GPT.context // SCALE, GPT.hidden // SCALE, options.layers, GPT.heads
    )
    setting = Setting("", small, options.ranks, "bf16", (), 1, options.batch)
    graphs = {engine: record(engine, setting) for engine in COMPARED}
    compute = graphs[COMPARED[0]].play(None)
    rows = {engine: figures_of(graph, compute) for engine, graph in graphs.items()}
    columns = [("overhead ms", "overhead", milliseconds)]
    for network in NETWORKS:
        columns += [
            (f"{network}: step ms", f"{network} step", milliseconds),
            ("exposed ms", f"{network} exposed", milliseconds),
        ]
    title = (
        f"GPT of {GPT.hidden} x {options.layers}, {options.ranks} ranks, {options.batch} sequences"
    )
    print_figures(title, columns, rows, options.out, compute_seconds=compute)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def figures_of(graph: Graph, compute: float) -> Figures:
    hidden = graph.play(None)
    figures = {"overhead": hidden - compute, "kernels": len(graph.tasks)}
    for network, bandwidth in NETWORKS.items():
        step = graph.play(bandwidth)
        figures |= {f"{network} step": step, f"{network} exposed": step - hidden}
    return figures


def record(engine: str, setting: Setting) -> Graph:
    """Record what forward and backward of ``engine`` launch."""
    global GRAPH  # noqa: PLW0603 - torch makes the streams and groups that append to it
    least = fused_wgrad._LEAST_ELEMENTS // SCALE**2
    with (
        mock.patch.multiple(host, _Group=_Group, _Stream=_Stream, _Event=_Event),
        mock.patch.object(fused_wgrad, "_LEAST_ELEMENTS", least),
        host.simulate_rank_of(setting.ranks),
    ):
        work = gpt_work(setting)
        GRAPH = graph = Graph()
        trainee, batch = ENGINES[engine].start(work), work.batch(0, 0)
        for _ in range(WARM_UP):
            trainee.step(batch)
        graph.forget_times()
        with _Kernels():  # type: ignore[no-untyped-call]
            trainee.loss(batch).backward()  # type: ignore[no-untyped-call]
    return graph


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # a DTensor; operators on its local tensors also arrive here
        result = func(*args, **(kwargs or {}))
        if not host.is_free(func):
            GRAPH.launch(Task(_seconds(func, args, kwargs or {}, result), set()))
        return result


def _seconds(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the time of a kernel for tensors with all sizes `SCALE` times larger."""
    leaves = pytree.tree_leaves((args, kwargs, result))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    seconds: float = max(KERNEL_SECONDS, num_bytes * SCALE**2 / BYTES_PER_SECOND)
    return max(seconds, _flops(func, args, kwargs, result) * SCALE**3 / FLOPS_PER_SECOND)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if func._schema.name in _PRODUCTS:
        products, position = _PRODUCTS[func._schema.name]
        batch, heads, time, width = args[position].shape
        return int(products * batch * heads * time**2 * width)  # causal: half of each product
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


class _Group(host._Group):
    def launched(self, num_bytes: int, *, times: int = 1) -> None:
        GRAPH.launch_collective(self, num_bytes, times)


class _Event(host._Event):
    reached: set[int] = set()  # noqa: RUF012 - default for events that were not recorded

    def record(self, stream: Any = None) -> None:
        recorded_on: Any = torch.cpu.current_stream() if stream is None else stream
        self.reached = set(recorded_on.reached)

    def wait(self, stream: Any = None) -> None:
        waits: Any = torch.cpu.current_stream() if stream is None else stream
        waits.wait_event(self)


class _Stream(host._Stream):
    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.reached: set[int] = set()  # tasks that the next task on this stream depends on

    def record_event(self, event: Any = None) -> Any:
        event = _Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        self.reached |= event.reached

    def wait_stream(self, other: Any) -> None:
        self.reached |= other.reached


if __name__ == "__main__":
    main()
