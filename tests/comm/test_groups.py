"""The process groups that are created for groups of ranks."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import _private
from shardwise.comm import communicator as module, process_group
from shardwise.comm.api import CollectiveId, Operation, RankGroup, Reduction, Stage
from shardwise.comm.communicator import Collectives, communicator, make_collectives
from shardwise.comm.device import DeviceStream, DeviceWork, device_of
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.features.host_collectives import HostCollectives
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import resolve_mesh
from shardwise.watch import ranks
from shardwise.watch.monitor import Patience
from shardwise.watch.status import LOOKS, Report, verdict
from tests.models import Gpt, GptBlock
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_training, options_of, runtime_of
from tests.waiting import PATIENCE_SECONDS, eventually
from tests.watching import watch_with

CPU = torch.device("cpu")


def _by_torch(world: RankGroup, device: torch.device, name: str) -> ProcessGroupCollectives:
    """The collectives of a backend without point-to-point exchanges."""
    return ProcessGroupCollectives(world, device, "gloo", name)


@contextmanager
def _made_by(make: Callable[..., Collectives]) -> Iterator[None]:
    """Create new communicators with ``make``, instead of those of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_communicators", weakref.WeakKeyDictionary())
        patch.setattr(module, "make_collectives", make)
        yield


@on_ranks(2)
def test_slots_follow_the_order_of_the_mesh_without_point_to_point() -> None:
    with _made_by(_by_torch):
        for order in ([0, 1], [1, 0]):
            mesh = DeviceMesh("cpu", order)
            assert_equal_training("stack", mesh=mesh)
            assert not communicator(resolve_mesh(mesh, PRESETS["fsdp"]).world, CPU).watch.is_active


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["hsdp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_the_ledger_counts_collectives_of_a_process_group_too(strategy: str) -> None:
    def make(world: RankGroup, device: torch.device, name: str) -> ProcessGroupCollectives:
        return _by_torch(world, device, f"{name}, counted with {strategy}")  # a unique name

    with _made_by(make):
        for wire in (sw.Wire(), sw.Wire(gather="int8", reduce="int4", block=64)):
            model = Gpt(vocabulary=50, width=32)
            sw.fully_shard(model, units=GptBlock, wire=wire, **options_of(strategy))
            for _ in range(2):
                model(torch.randint(50, (2, 16))).backward()
            assert sw.ledger(model).sent_bytes() == sent_bytes(runtime_of(model).plan)


@on_ranks(4)
def test_reductions_of_a_permuted_mesh_without_point_to_point() -> None:
    with _made_by(_by_torch):
        for strategy in ("hsdp", "hfsdp"):
            mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("replicate", "shard"))
            assert_equal_training("stack", mesh=mesh, strategy=strategy)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(3)
def test_ranks_that_have_created_other_groups_agree(by_torch: bool) -> None:
    """Rank 2 is not in the first group, so torch counts fewer groups there."""
    dist.new_group([0, 1])
    make = _by_torch if by_torch else make_collectives
    with _made_by(make):
        mesh = DeviceMesh.from_group(dist.new_group([0, 1, 2]), "cpu")
        model = sw.fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(3)
def test_a_mesh_of_some_ranks_creates_its_groups_once() -> None:
    if dist.get_rank() == 2:
        dist.barrier()
        return
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"), _init_backend=False)
    threads = []
    before = set(threading.enumerate())  # threads of earlier tests may end at any time
    for _ in range(3):
        model = sw.fully_shard(nn.Linear(4, 4), mesh=mesh, strategy="hsdp")
        model(torch.ones(1, 4)).sum().backward()
        threads.append(set(threading.enumerate()) - before)
    assert threads[0] == threads[1] == threads[2]
    dist.barrier()


@on_ranks(2)
def test_each_device_has_a_communicator_of_its_own() -> None:
    group = dist.new_group([0, 1], backend="fake")
    world = RankGroup((0, 1), dist.get_rank(), group)
    with _made_by(_by_torch):
        one, other = (communicator(world, torch.device(name)) for name in ("cpu", "meta"))
        assert one is communicator(world, CPU)
        assert one is not other


@on_ranks(2)
def test_groups_have_the_timeout_of_their_parent() -> None:
    parent = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    world = RankGroup((0, 1), dist.get_rank(), parent)
    queue = make_collectives(world, CPU, "gather")
    assert isinstance(queue, HostCollectives)
    assert queue.point_to_point.timeout == timedelta(seconds=77)
    own = ProcessGroupCollectives(world, CPU, "gloo", "gather")._process_group(world)
    assert own is not None
    assert own._get_backend(CPU).options._timeout == timedelta(seconds=77)


@on_ranks(2)
def test_gloo_is_refused_for_tensors_on_a_gpu() -> None:
    world = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
    with pytest.raises(sw.PlanError, match=r"cuda:0.*Gloo.*backend=\"cpu:gloo,cuda:nccl\""):
        make_collectives(world, torch.device("cuda", 0), "gather")
    with pytest.raises(sw.PlanError, match=r"xpu:0, for which the process group has no backend"):
        make_collectives(world, torch.device("xpu", 0), "gather")


@on_ranks(2)
def test_later_stages_of_a_reduction_have_a_stream_of_their_own() -> None:
    """The next reduce-scatter waits for compute but not for the all-reduce before it."""
    rank = dist.get_rank()
    row = RankGroup((0, 1), rank, dist.group.WORLD)
    column = RankGroup((1, 0), rank, dist.group.WORLD)
    queue = ProcessGroupCollectives(row, CPU, "gloo", "stages")
    stages = (Stage(Operation.REDUCE_SCATTER, row), Stage(Operation.ALL_REDUCE, column))
    used: list[object] = []
    enqueue = DeviceStream.enqueue

    def recorded(stream: DeviceStream, after: Any = None, *, timed: bool) -> Any:
        used.append(stream)
        return enqueue(stream, after, timed=timed)

    with mock.patch.object(DeviceStream, "enqueue", recorded):
        for _ in range(2):
            flat, out = torch.ones(4), torch.empty(2)
            work = queue.reduce(Reduction(flat, out, None, out, stages), "reduce")
            assert torch.equal(out, torch.full((2,), 4.0))
            assert work.span[1] >= work.span[0]
    assert used == [queue.stream, queue._second_stream] * 2


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(3)
def test_the_largest_values_of_all_ranks(by_torch: bool) -> None:
    rank = dist.get_rank()
    group = RankGroup((2, 0, 1), rank, dist.group.WORLD)
    queue = (_by_torch if by_torch else make_collectives)(group, CPU, f"largest {by_torch}")
    values = torch.tensor([rank == 0, rank == 1, False, True], dtype=torch.uint8)
    queue.all_reduce_max(values, group, "largest").wait()
    assert values.tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(3)
def test_ranks_exchange_tensors_of_different_sizes(by_torch: bool) -> None:
    rank = dist.get_rank()
    world = RankGroup((2, 0, 1), rank, dist.group.WORLD)
    queue = (_by_torch if by_torch else make_collectives)(world, CPU, f"exchange {by_torch}")
    # Pairs: 0 and 1, one way; 0 and 2, both ways.
    sizes = {(0, 1): 5, (1, 0): 0, (0, 2): 70_000, (2, 0): 3}
    others = sorted({to for of, to in sizes if of == rank})

    def filled(of: int, to: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(sizes[of, to]).add_(10 * of + to).to(dtype)

    for dtype in (torch.bfloat16, torch.uint8, torch.int16, torch.complex64):
        pairs = {
            other: (
                filled(rank, other, dtype),
                torch.full((sizes[other, rank],), 99, dtype=dtype),
            )
            for other in others
        }
        work = queue.exchange(pairs, "exchange")
        work.wait()
        assert work.error is None
        for other, (_, received) in pairs.items():
            assert torch.equal(received, filled(other, rank, dtype))
        assert [sent.num_bytes for sent in work.sent] == [
            sizes[rank, other] * dtype.itemsize for other in others
        ]


@on_ranks(2)
def test_a_gather_passes_few_frames() -> None:
    """Between the function that performs events and torch.distributed."""
    seen: list[list[str]] = []
    gather = process_group._all_gather

    def watched(*args: Any, **kwargs: Any) -> Any:
        frame, files = inspect.currentframe(), []
        while (frame := frame.f_back if frame else None) is not None:
            files.append(frame.f_code.co_filename)
            if frame.f_code.co_name.strip("_") == "perform":
                seen.append(files)
                break
        return gather(*args, **kwargs)

    patched = mock.patch.object(process_group, "_all_gather", watched)
    with patched, _made_by(_by_torch):
        mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
        model = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh, units=nn.Linear)
        model(torch.ones(1, 4)).sum().backward()
    assert seen
    assert max(len(files) for files in seen) <= 7
    assert max(len(set(files)) for files in seen) <= 3


def _names_of_groups() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def test_all_groups_are_aborted_at_the_same_time() -> None:
    """The abort of one may end only after that of another has begun."""
    queue = ProcessGroupCollectives(RankGroup((0,), 0), torch.device("cpu"), "fake", "queue")
    met = threading.Barrier(2)
    groups = [mock.Mock(abort=lambda: met.wait(PATIENCE_SECONDS)) for _ in range(2)]
    queue._groups = {(str(number), False): group for number, group in enumerate(groups)}
    queue.stop()
    assert not met.broken


@on_ranks(2)
def test_the_heartbeat_thread_is_on_the_device_of_the_rank() -> None:
    with mock.patch.object(ranks, "make_current") as made:
        made.side_effect = lambda _device: callers.add(threading.current_thread())
        callers: set[threading.Thread] = set()
        world = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
        with watch_with(Patience(beat_seconds=0.02)):
            kept = module.Communicator(world, CPU)
        # Communicators of earlier tests may have other devices.
        own = mock.call(torch.device("cpu"))
        assert eventually(lambda: own in made.call_args_list and bool(callers))
        assert threading.main_thread() not in callers
        dist.barrier()
        del kept


@on_ranks(2)
def test_recovery_frees_the_groups_of_the_step_that_raised() -> None:
    world = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
    queue = ProcessGroupCollectives(world, CPU, "gloo", "recovered")
    before = _names_of_groups()  # groups of earlier tests may end at any time
    for epoch in range(1, 4):
        assert queue._process_group(world) is not None
        assert len(_names_of_groups() - before) == 1
        dist.barrier()  # a rank that still connects would lose this one
        queue.stop()
        queue.restart(epoch)
        assert not _names_of_groups() - before


@on_ranks(2)
def test_a_group_of_a_job_that_is_bound_to_devices_ends_with_the_job() -> None:
    """Torch would not know it by itself. Gloo stands for NCCL here."""
    store, gloo = HashStore(), dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(gloo)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._register_backend(CPU, gloo, backend)
    name = dist.distributed_c10d.GroupName("bound")
    group._set_group_name(name)
    _private._add_to_job(group, name, store, [dist.get_rank()])
    known = dist.distributed_c10d._world
    assert dist.get_process_group_ranks(group) == [dist.get_rank()]
    assert dist.get_group_rank(group, dist.get_rank()) == 0
    assert dist.get_backend_config(group) == "cuda:nccl"
    with mock.patch.object(dist.distributed_c10d, "_unregister_process_group") as unregistered:
        dist.destroy_process_group(group)
    unregistered.assert_called_once_with("bound")
    tables = (known.pg_map, known.pg_names, known.pg_backend_config, known.pg_to_tag)
    assert not any(group in table for table in tables)
    assert not any(group in groups for groups in known.tags_to_pg.values())


def test_a_group_that_is_created_while_the_ranks_are_stopped_is_aborted() -> None:
    group = RankGroup((0, 1), 0)
    queue = ProcessGroupCollectives(group, CPU, "gloo", "late")
    made = mock.Mock()

    def new_group(*_args: Any, **_options: Any) -> Any:
        queue.stop()  # as the heartbeat thread does
        return made

    with (
        mock.patch.object(process_group, "new_group", new_group),
        pytest.raises(sw.PeerAborted, match="until the ranks have recovered"),
    ):
        queue._process_group(group)
    made.abort.assert_called_once_with()
    assert not queue._groups


def test_a_rank_that_has_not_left_a_creation_yet_is_not_stuck_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may stand still after its last report, while the others wait for its first collective."""
    store, what = HashStore(), ("key", RankGroup((0, 1), 0), "a group", timedelta(seconds=60))
    monkeypatch.setattr(process_group, "default_store", lambda: store)
    queues = [ProcessGroupCollectives(RankGroup((0, 1), n), CPU, "gloo", "q") for n in range(2)]
    with ThreadPoolExecutor(1) as thread:
        creation = thread.submit(queues[1]._meet, *what)
        assert eventually(lambda: queues[1].state().running is not None)
        late = queues[1].state()
        queues[0]._meet(*what)
        creation.result(PATIENCE_SECONDS)
    gather = CollectiveId(1, "gather", 64, (0, 1))
    waits = replace(queues[0].state(), issued=1, begun=1, running=gather)
    stuck = [Report(0, LOOKS, 0, "forward", (state,)) for state in (waits, late)]
    assert verdict(stuck, 0) is None
    stuck[0] = replace(stuck[0], queues=(replace(waits, ended=()),))
    assert isinstance(verdict(stuck, 0), sw.RanksDiverged), "it has not come to the creation"


def test_events_are_freed_by_the_thread_that_launches() -> None:
    """CUDA's driver may let a thread wait that frees one, and the heartbeat must go on."""
    group = RankGroup((0, 1), 0)
    queue = ProcessGroupCollectives(group, CPU, "gloo", "events")
    queue.is_monitored = True  # as on a device
    freed: list[threading.Thread] = []
    for _ in range(2):
        work = DeviceWork(device_of(CPU))
        weakref.finalize(work, lambda: freed.append(threading.current_thread()))
        queue._record(work, "gather", 0, group)
    del work
    with ThreadPoolExecutor(1) as heartbeat:
        assert heartbeat.submit(queue.state).result(PATIENCE_SECONDS).running is None
    assert not freed
    queue._record(DeviceWork(device_of(CPU)), "gather", 0, group)
    assert freed == [threading.current_thread()] * 2


@on_ranks(2)
def test_a_rank_does_not_create_a_group_alone() -> None:
    """No error of another rank could end the creation."""
    world = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
    queue = ProcessGroupCollectives(world, CPU, "gloo", "alone")
    queue.is_monitored = True  # as on a device
    if world.own_rank == 1:
        dist.barrier()
        return
    with (
        mock.patch.object(process_group, "new_group") as made,
        ThreadPoolExecutor(1) as thread,
    ):
        creation = thread.submit(queue._process_group, world)
        assert eventually(lambda: queue.state().running is not None)
        running = queue.state().running
        assert running is not None
        assert (running.label, running.ranks) == ("creation of a process group", (0, 1))
        queue.stop()
        with pytest.raises(sw.PeerAborted, match="until the ranks have recovered"):
            creation.result(PATIENCE_SECONDS)
    made.assert_not_called()
    assert queue.state().running is None
    dist.barrier()
