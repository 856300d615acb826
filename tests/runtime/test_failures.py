"""C6: errors name their cause, reach every rank, and leave a model that can go on training."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import _private
from shardwise.comm.api import Work
from shardwise.runtime import engine
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.schedule.sequencer import UnitState
from tests.covering import covered_first
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.modules import FailingLinear, raise_together
from tests.runtime.one_process import (
    assert_equal_steps,
    comm_of,
    options_of,
    runtime_of,
    sharded_pair,
)
from tests.waiting import eventually
from tests.watching import watch_of

EVERY = (0, 1, 2)


@on_ranks(3)
@pytest.mark.parametrize(
    ("position", "where", "raising"),
    covered_first(product((1, 3), ("forward", "backward"), (EVERY, (0,), (2,), (0, 2)))),
    ids=str,
)
def test_an_exception_reaches_every_rank_and_the_next_step_works(
    where: str, position: int, raising: Sequence[int]
) -> None:
    _raise(where, position, raising)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "raising"), [("ddp", 0), ("hsdp", 3)])
def test_an_exception_reaches_every_replica(strategy: str, raising: int) -> None:
    for where in ("forward", "backward"):
        _raise(where, 1, [raising], strategy)


class Reordered(nn.Module):
    """Calls its units in an order of choice, and may raise after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = (0, 1, 2)
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        if self.raises:
            raise ValueError("it hurts")
        return x


@on_ranks(2)
def test_ranks_forget_the_order_of_a_pass_that_only_some_have_ended() -> None:
    """They would gather other units ahead in the next step."""
    torch.manual_seed(0)
    reference, model = sharded_pair(Reordered().double(), units=Block)
    _check_step(model, reference)
    model.order, model.raises = (0, 2, 1), dist.get_rank() == 1
    with pytest.raises((ValueError, sw.PeerAborted)):
        model(torch.randn(4, WIDTH).double()).square().mean().backward()
    model.order, model.raises = (0, 1, 2), False
    _check_step(model, reference)


@on_ranks(2)
def test_no_memory_for_cast_inputs_on_one_rank_fails_the_step_of_both() -> None:
    torch.manual_seed(0)
    precision = sw.MixedPrecisionPolicy(param_dtype=torch.float64)
    reference, model = sharded_pair(nn.Sequential(Block(), Block()).double(), mp_policy=precision)
    _check_step(model, reference)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(engine, "cast_tensors", _no_memory)
        with pytest.raises((MemoryError, sw.PeerAborted)):
            model(torch.randn(4, WIDTH).double()).square().mean().backward()
    _check_step(model, reference)


def test_an_error_in_the_middle_of_a_gather_leaves_sharded_parameters() -> None:
    reference, model = sharded_pair(Block().double())
    _check_step(model, reference)
    last = runtime_of(model).units[0].parameters[-1]
    use = FSDPParameter.use_unsharded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FSDPParameter,
            "use_unsharded",
            lambda parameter: _no_memory() if parameter is last else use(parameter),
        )
        with pytest.raises(MemoryError):
            model(torch.randn(4, WIDTH).double())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    _check_step(model, reference)


def _no_memory(*_: object) -> None:
    raise MemoryError


@on_ranks(1)
def test_an_exception_in_one_process_is_the_users_own() -> None:
    _raise("backward", 3, EVERY)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_next_step_waits_for_the_thread_of_a_backward_that_raised(
    monkeypatch: pytest.MonkeyPatch, in_transaction: bool
) -> None:
    """On a device, a thread may drop the graph task after ``backward`` has raised."""
    reference, model = _make()
    failing = model[3]
    _check_step(model, reference)
    held = _held_callbacks(monkeypatch)
    failing.where = "backward"
    loss = model(torch.randn(4, WIDTH).double()).square().mean()
    step = sw.transaction(model) if in_transaction else contextlib.nullcontext()
    late = threading.Timer(0.1, held.clear)
    with pytest.raises(ValueError, match="it hurts"), step:
        _backward_then(late.start, loss)
    monkeypatch.undo()
    failing.where = ""
    _check_step(model, reference)
    late.join()
    assert not held
    _check_step(model, reference)


def _held_callbacks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Hold the callbacks for the end of a backward, until the list is cleared."""
    held: list[object] = []
    original = _private.queue_callback

    def queue_and_hold(callback: Callable[[], None]) -> None:
        held.append(callback)
        original(callback)

    monkeypatch.setattr(_private, "queue_callback", queue_and_hold)
    return held


@on_ranks(2, deadline=40.0)
def test_a_destructor_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run on any thread, also on one that holds the lock of the communicator."""
    reference, model = _make()
    failing = model[3]
    _check_step(model, reference)
    held = _held_callbacks(monkeypatch)
    failing.where, failing.ranks = "backward", dist.group.WORLD
    with pytest.raises(ValueError, match="it hurts"):
        model(torch.randn(4, WIDTH).double()).square().mean().backward()
    monkeypatch.undo()
    failing.where = ""
    comm = comm_of(model)
    dist.barrier()  # the other rank has raised its own error, too
    assert not comm.watch.is_broken
    with watch_of(comm)._locked():
        held.clear()
        assert not comm.watch.is_broken
    assert eventually(lambda: comm.watch.is_broken)
    _check_step(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("swap", ["another unit", "one more forward", "evaluation on one rank"])
def test_ranks_that_diverge_are_named_on_every_rank(swap: str) -> None:
    reference, model = _make()
    _check_step(model, reference)
    x = torch.randn(4, WIDTH).double()
    first = dist.get_rank() == 0
    started = time.monotonic()
    with pytest.raises(sw.RanksDiverged) as caught:  # noqa: PT012 - any of them may raise
        match swap:
            case "another unit":
                y = model[0](x) if first else model[2](x)
            case "one more forward":
                y = model(model(x)) if first else model(x)
                y.sum().backward()
            case _:
                if first:
                    with torch.no_grad():
                        model(x)
                model(x).sum().backward()
        model(x).sum().backward()
    assert time.monotonic() - started < 45
    text = str(caught.value)
    assert re.search(r"\n  0 +1 .*\n  1 +1 ", text), "rank and step of each"
    assert "waits for" in text
    for _ in range(2):
        _check_step(model, reference)


@on_ranks(2)
def test_double_backward_is_refused() -> None:
    reference, model = _make()
    x = torch.randn(4, WIDTH).double()
    with pytest.raises(sw.StepError, match="create_graph"):
        model(x).square().mean().backward(create_graph=True)
    _check_step(model, reference)


@on_ranks(2)
def test_a_user_may_catch_an_exception_inside_forward() -> None:
    reference, model = sharded_pair(Forgiving().double(), units={FailingLinear, Block})
    for where in ("", "forward", "forward", ""):
        model.risky.where = reference.risky.where = where
        _check_step(model, reference)


def _make(strategy: str = "fsdp") -> tuple[Any, Any]:
    layers = nn.Sequential(Block(), FailingLinear(), Block(), FailingLinear(), Block()).double()
    return sharded_pair(layers, units={Block, FailingLinear}, **options_of(strategy))


@on_ranks(2)
@pytest.mark.parametrize(
    ("owner", "name"), [(FlatParameters, "launch_gather"), (Gradients, "launch_reduce")]
)
def test_an_error_between_two_launches_of_a_unit_waits_for_the_first(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Otherwise the buffer of the first collective would be freed while it is in flight."""
    model = TwoDtypes()
    sw.fully_shard(model)
    launch, quiesce = getattr(owner, name), Unit.quiesce
    launched: list[Work] = []
    awaited: list[Work] = []

    def launch_once(self: Any, *args: Any) -> Work:
        if launched:
            raise_together(torch.OutOfMemoryError("no more"), dist.group.WORLD)
        launched.append(launch(self, *args))
        return launched[0]

    def record(unit: Unit, until: float) -> bool:
        awaited.extend((*unit._gathering, *unit._reducing))
        return quiesce(unit, until)

    x = torch.randn(4, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, launch_once)
        patch.setattr(Unit, "quiesce", record)
        with pytest.raises(torch.OutOfMemoryError, match="no more"):
            model(x).sum().backward()
    assert any(work is launched[0] for work in awaited)
    model(x).sum().backward()
    assert is_sharded(model)


class TwoDtypes(nn.Module):
    """A unit with two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.double_ = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.double_(self.single(x).double())
        return y


def is_sharded(model: nn.Module) -> bool:
    scheduler = runtime_of(model).scheduler
    states = map(scheduler.sequencer.state, range(len(scheduler.units)))
    return all(state is UnitState.SHARDED for state in states)


def _check_step(model: nn.Module, reference: nn.Module) -> None:
    assert_equal_steps(model, reference, 1, zeroes=True)
    assert is_sharded(model)
    assert sw.ledger(model).gathered_bytes == 0


def _backward_then(after: Callable[[], None], loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        after()


def _raise(where: str, position: int, raising: Sequence[int], strategy: str = "fsdp") -> None:
    reference, model = _make(strategy)
    failing = model[position]
    rank, size = dist.get_rank(), dist.get_world_size()
    failing.ranks = dist.new_group([one for one in raising if one < size])
    for _ in range(2):
        _check_step(model, reference)
        failing.where = where if rank in raising else ""
        expected = ValueError if rank in raising else sw.PeerAborted
        with pytest.raises(expected, match=r"it hurts|in backward|gave up"):
            model(torch.randn(4, WIDTH).double()).square().mean().backward()
        failing.where = ""
        if raising == EVERY:
            runtime_of(model).scheduler.await_abandoned()
            assert is_sharded(model)
        _check_step(model, reference)


@on_ranks(4)
def test_errors_within_a_dim_of_a_mesh_list_its_ranks_in_the_job() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    failing, rank = FailingLinear(), dist.get_rank()
    model = sw.fully_shard(nn.Sequential(failing, nn.Linear(WIDTH, WIDTH)), mesh=mesh["dp"])
    failing.ranks = dist.new_group([2])
    failing.where = "forward" if rank == 2 else ""
    error = {0: sw.PeerAborted, 2: ValueError}.get(rank)
    with contextlib.nullcontext() if error is None else pytest.raises(error) as raised:
        model(torch.ones(1, WIDTH)).mean().backward()
    if rank == 0:
        assert raised is not None
        assert str(raised.value).endswith("; ranks of this mesh, in order, are 0, 2 of the job")
    dist.barrier()


class Forgiving(nn.Module):
    """Calls another unit if the first one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.risky = FailingLinear()
        self.safe = Block()

    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self.risky(x)
        except ValueError:
            y = self.safe(x)
        return y
