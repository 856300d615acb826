"""Notes on out-of-memory errors say what holds memory, and what would free some of it."""

import errno
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.features import held_memory
from shardwise.features.held_memory import is_out_of_memory
from shardwise.recording.memory_meter import MemoryMeter
from shardwise.runtime.memory import Arena
from shardwise.runtime.module import handle_of
from tests.fsdp.extended import Pair, replace_weights
from tests.ranks import on_ranks
from tests.runtime.modules import raise_together
from tests.runtime.one_process import runtime_of

WIDTH = 500  # so that a layer has about a megabyte
TOO_MUCH = 1 << 50


def run_out_of_memory() -> None:
    dist.barrier()  # a rank that is late would raise `PeerAborted`
    torch.empty(TOO_MUCH)


class Layer(nn.Linear):
    """Allocates too much in ``place``."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("ones", torch.ones(WIDTH, 100))
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "forward":
            run_out_of_memory()
        y: Tensor = _Greedy.apply(super().forward(x), self.place == "backward")  # type: ignore[no-untyped-call]
        return y


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_greedy: bool) -> Tensor:
        ctx.is_greedy = is_greedy
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.is_greedy:
            run_out_of_memory()
        return gradient, None


@on_ranks(2)
def test_an_allocation_that_fails_in_forward_is_explained() -> None:
    model, optimizer = _trained(reshard_after_forward=False)
    _layer(model).place = "forward"
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        model(torch.ones(2, WIDTH))
    note, largest = _only_note(caught.value), "3 1.0 MB, 2 1.0 MB, 1 1.0 MB"
    assert note.splitlines() == [
        "out of memory in step 1, forward of 2; on cpu are:",
        "  shards                              2.0 MB",
        f"  gathered units                      4.0 MB  4 of 5; the largest: {largest}",
        "  gradients before reduction          0.0 MB",
        "  gradients                           0.0 MB",
        "  optimizer states                    4.0 MB",
        "  buffers                             0.8 MB",
        "  kept for the next units             0.0 MB",
        "to free some of it:",
        "  reshard_after_forward=True frees units until their backward: up to 4.0 MB",
        "  prefetch=0 instead of 1 gathers none ahead: up to 1.0 MB",
    ]
    _layer(model).place = ""
    _step(model, optimizer)


@on_ranks(2)
def test_an_allocation_of_the_engine_that_fails_is_explained() -> None:
    model, optimizer = _trained()
    allocate = Arena.allocate

    def fail(pool: Arena, num_bytes: int, owner: str = "") -> torch.UntypedStorage:
        if owner.startswith("2."):
            raise_together(torch.OutOfMemoryError("no more"), dist.group.WORLD)
        return allocate(pool, num_bytes, owner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "allocate", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no more") as caught:
            model(torch.ones(2, WIDTH))
    assert "out of memory in step 1, forward of 1; on cpu are:" in _only_note(caught.value)
    _step(model, optimizer)


@on_ranks(2)
def test_an_allocation_that_fails_in_backward_is_explained_by_a_transaction() -> None:
    """Only the caller of backward gets autograd's exception."""
    model, optimizer = _trained()
    _layer(model).place = "backward"
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        _step(model, optimizer)
    note = _only_note(caught.value)
    assert "out of memory in step 1, backward of 2; on cpu are:" in note
    assert re.search(r"gradients before reduction +1\.0 MB", note)
    _layer(model).place = ""
    _step(model, optimizer)


@on_ranks(2)
def test_an_accelerator_that_ran_out_of_memory_in_backward_is_a_warning() -> None:
    counts = iter([0, 1, 1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_memory, "num_allocation_failures", lambda _: next(counts))
        model, _ = _trained()
        _layer(model).place = "backward"
        loss = model(torch.ones(2, WIDTH)).sum()
        with pytest.warns(UserWarning, match=r"out of memory in step 1, backward of 2"):
            _run_out_of_memory(model, loss)


def _run_out_of_memory(model: nn.Module, loss: Tensor) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        loss.backward()  # type: ignore[no-untyped-call]
    runtime_of(model).scheduler.await_abandoned()


@on_ranks(2)
def test_parameters_with_all_gather_extensions_are_counted() -> None:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    replace_weights(model, lambda weight: Pair(weight, weight.clone()))
    sw.fully_shard(model, granularity="dim")
    error = torch.OutOfMemoryError("no more")
    handle_of(model).runtime.scheduler.explain(error)
    assert re.search(r"shards +2\.0 MB\n", _only_note(error))
    assert re.search(r"gathered units +0\.0 MB\n", _only_note(error))
    model.unshard()
    error = torch.OutOfMemoryError("no more")
    handle_of(model).runtime.scheduler.explain(error)
    assert re.search(r"gathered units +4\.0 MB  1 of 1", _only_note(error))
    meter = MemoryMeter(model, handle_of(model).runtime, optimizer=None)
    assert meter.sample(gathered_bytes=0).gradients == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OSError(errno.ENOMEM, "mmap"), True),
        (OSError(errno.EACCES, "mmap"), False),
        (RuntimeError("it hurts"), False),
    ],
    ids=str,
)
def test_errors_of_memory_are_told_from_others(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def _layer(model: nn.Module) -> Layer:
    layer = model.get_submodule("2")
    assert isinstance(layer, Layer)
    return layer


def _only_note(error: BaseException) -> str:
    [note] = error.__notes__
    return note


def _trained(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Train one step, so that the optimizer has states."""
    model = nn.Sequential(*(Layer() for _ in range(4)))
    sw.fully_shard(model, units=Layer, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sw.transaction(model, optimizer):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
