"""A signal handler may raise anywhere in the engine: the next step has the numbers of one process.

Signals are replaced by exceptions at calls of the engine's functions, in turn.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.features import gathered
from tests.covering import covered_first
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_equal_models,
    assert_equal_steps,
    own_part,
    rows,
    runtime_of,
    sharded_pair,
    squares,
)

_ENGINE = str(Path(sw.__file__).parent)


class Interrupt(BaseException):
    """What the handler raises."""


class Calls:
    """Counts calls of the engine's functions by this thread, and raises in one of them."""

    def __init__(self, raising: int = -1) -> None:
        self.count = 0
        self._raising = raising

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        # Python ignores what is raised where it closes a generator, and in destructors.
        is_ignored = code.co_flags & inspect.CO_GENERATOR or code.co_name == "__del__"
        if not code.co_filename.startswith(_ENGINE) or is_ignored:
            return
        if event == "call" and self.count == self._raising:
            self._raising = -1
            raise Interrupt
        self.count += 1


def _step(model: Any, whole: Tensor) -> None:
    squares(model, own_part(whole)).backward()


def _succeeds(model: Any, whole: Tensor) -> bool:
    with contextlib.suppress(sw.PeerAborted):
        _step(model, whole)
        return True
    return False


def _two_micro_batches(model: Any, whole: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    _step(model, whole)
    model.set_requires_gradient_sync(True)
    _step(model, whole)


def _gathered(model: Any, _whole: Tensor) -> None:
    with sw.gathered(model):
        pass


@on_ranks()
@pytest.mark.parametrize(
    ("run", "granularity", "world_size"),
    covered_first(
        list(product((_step, _two_micro_batches, _gathered), ("element", "dim"), (1, 2)))
    ),
)
def test_an_interrupt_anywhere_changes_no_later_number(
    run: Callable[[Any, Tensor], None], granularity: str, world_size: int
) -> None:
    reference, model = _make(granularity)
    every, whole = Calls(), rows()
    with every.counted():
        run(model, whole)
    assert every.count > 100
    # Ranks do not call equally many functions while they wait for each other.
    for raising in range(0, every.count * 3 // 4, 41 if world_size == 1 else 97):
        calls = Calls(raising)
        with pytest.raises((Interrupt, sw.PeerAborted)), calls.counted():
            run(model, whole)
        model.set_requires_gradient_sync(True)
        model.zero_grad()
        # A rank that raised where no unit was running hears of the others in its next step.
        while not _succeeds(model, whole):
            pass
        assert_equal_steps(model, reference, 1, zeroes=True)
        assert all(isinstance(one, DTensor) for one in model.parameters())
        assert not runtime_of(model).scheduler.sequencer._stack


def test_gradients_that_were_not_added_up_to_the_end_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, model = _make("element")
    unit, whole = runtime_of(model).units[1], rows()
    model.set_requires_gradient_sync(False)
    _step(model, whole)
    with monkeypatch.context() as patch:
        patch.setattr(unit.gradients[0], "end_backward", _interrupt)
        with pytest.raises(Interrupt):
            _step(model, whole)
    with pytest.raises(sw.StepError, match=r"interrupted while it added up .* call zero_grad\(set"):
        _step(model, whole)
    model.zero_grad()
    reference.zero_grad()
    _two_micro_batches(model, whole)
    (2 * squares(reference, whole)).backward()
    assert_equal_models(model, reference, 0)


def test_a_transaction_restores_gradients_that_were_not_added_up_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, model = _make("element")
    model.zero_grad()
    reference.zero_grad()
    optimizer, whole = torch.optim.SGD(model.parameters()), rows()
    unit = runtime_of(model).units[1]
    model.set_requires_gradient_sync(False)
    _step(model, whole)
    with monkeypatch.context() as patch:
        patch.setattr(unit.gradients[0], "end_backward", _interrupt)
        with pytest.raises(Interrupt), sw.transaction(model, optimizer):
            _step(model, whole)
    model.set_requires_gradient_sync(True)
    _step(model, whole)
    (2 * squares(reference, whole)).backward()
    assert_equal_models(model, reference, 0)


@on_ranks(1)
def test_a_transaction_is_open_no_longer_wherever_it_was_interrupted() -> None:
    _, model = _make("element")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = Calls()
    with every.counted(), sw.transaction(model, optimizer):
        pass
    assert every.count > 50
    for raising in range(every.count):
        calls = Calls(raising)
        with contextlib.suppress(Interrupt), calls.counted(), sw.transaction(model, optimizer):
            pass


@on_ranks(2)
def test_a_model_can_be_joined_wherever_the_begin_of_sw_join_was_interrupted() -> None:
    reference, model = _make("element")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = Calls()
    with contextlib.suppress(Interrupt), every.counted(), sw.join(model, optimizer):
        begin = every.count
        raise Interrupt
    for raising in range(0, begin, 5):
        calls = Calls(raising)
        with contextlib.suppress(Interrupt), calls.counted(), sw.join(model, optimizer):
            raise AssertionError
    while not _succeeds(model, rows()):
        pass
    assert_equal_steps(model, reference, 1, zeroes=True)


def _add_one(model: Any) -> None:
    with torch.no_grad(), sw.gathered(model, write_back=True):
        for parameter in model.parameters():
            parameter.add_(1)


@on_ranks(1)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_changes_in_gathered_are_written_whole_or_not_at_all(granularity: str) -> None:
    reference, model = _make(granularity)
    every, outcomes = Calls(), set()
    with every.counted():
        _add_one(model)
    for raising in range(0, every.count, 7):
        reference.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        with contextlib.suppress(Interrupt), Calls(raising).counted():
            _add_one(model)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        changes = {torch.equal(new.full_tensor(), old) for new, old in pairs}
        assert len(changes) == 1
        outcomes |= changes
    assert outcomes == {True, False}


@on_ranks(2)
def test_a_rank_that_is_interrupted_as_ranks_compare_changes_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, model = _make("element")
    with monkeypatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(gathered, "check_same_sums", _interrupt)
        with pytest.raises(Interrupt if dist.get_rank() == 1 else sw.PeerAborted):
            _add_one(model)
    assert_equal_steps(model, reference, 1, zeroes=True)


def _interrupt(*_: object) -> None:
    raise Interrupt


def _make(granularity: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).double()
    reference, model = sharded_pair(layers, units=Block, granularity=granularity)
    assert_equal_steps(model, reference, 3, zeroes=True)
    return reference, model
