"""Events of an accelerator have times only in steps that somebody measures."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import device as transport_device
from shardwise.errors import StepError
from shardwise.recording import record
from shardwise.recording.format import read_recording
from shardwise.runtime.attach import settings_of
from tests.streams.install import simulated
from tests.streams.models import CASES, build
from tests.streams.programs import DEVICE
from tests.streams.simulation import Simulation

BATCH = 2


@pytest.fixture
def num_timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts events that are timed: its last element is the number so far."""
    counted = [0]

    class Counted(transport_device.TimedEvent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            counted[0] += 1

    monkeypatch.setattr(transport_device, "TimedEvent", Counted)
    return counted


def step(model: nn.Module) -> None:
    loss = CASES["stack"].loss(model(CASES["stack"].batch(BATCH).to(DEVICE)))
    torch.autograd.backward(loss)


def sharded() -> Any:
    return sw.fully_shard(build("stack").to(DEVICE), units=CASES["stack"].units)


def test_a_step_is_timed_only_if_it_is_measured(num_timed: list[int]) -> None:
    with simulated(Simulation(), exchanges=False):
        model = sharded()
        step(model)
        num_timed[0] = 0
        step(model)
        assert num_timed == [0]
        ledger = sw.ledger(model)
        assert all(math.isnan(record.seconds) for record in ledger.records())
        with pytest.raises(StepError, match="takes_times = True"):
            ledger.overlapped_share()
        ledger.takes_times = True
        step(model)
        assert num_timed[0] > len(ledger.records())
        assert ledger.overlapped_share() >= 0.0
        assert not any(math.isnan(record.seconds) for record in ledger.records())


def test_a_recording_times_its_detailed_steps(
    num_timed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "name_of", str)
    counts = []
    with simulated(Simulation(), exchanges=False):
        model = sharded()
        with sw.record(model, tmp_path, steps=(1,)):
            for _ in range(3):
                before = num_timed[0]
                step(model)
                counts.append(num_timed[0] - before)
        step(model)
    [rank] = read_recording(tmp_path)
    assert rank.detailed_steps == (1,)
    assert [one.exposed_seconds is None for one in rank.steps] == [True, False, True]
    assert [one.communication_seconds is None for one in rank.steps] == [True, False, True]
    assert all(math.isfinite(one.ended - one.began) for one in rank.steps)
    assert counts[2] == 2, "the begin and the end of the step"
    assert counts[1] > len(rank.events)


def test_a_communication_hook_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the host's stream, and has times of the host."""
    monkeypatch.setattr(record, "name_of", str)
    with simulated(Simulation(), exchanges=False):
        model = sharded()
        for module in model.modules():
            if isinstance(module, sw.FSDPModule):
                settings_of(module).collective_hook = lambda _flat, *_reduced: None
        with sw.record(model, tmp_path, steps=(1,)):
            for _ in range(2):
                step(model)
    [rank] = read_recording(tmp_path)
    assert len(rank.steps) == 2
