"""Measuring a machine for forecasts."""

from pathlib import Path

import pytest
import torch

from shardwise.bench import calibrate
from shardwise.forecast.machines.calibrated import CalibratedMachine
from shardwise.train.model import gpt_shape

TINY = {"cpu": (gpt_shape(64, 16, 32, 1, 2),)}


def test_a_fit_finds_the_terms_and_no_negative_ones() -> None:
    points = [(f, b, 1e-5 + f * 1e-11 + b * 1e-10) for f in (1e6, 1e8) for b in (1e4, 1e7)]
    rate = calibrate._fit(points)
    assert rate.start == pytest.approx(1e-5)
    assert rate.per_flop == pytest.approx(1e-11)
    assert rate.per_byte == pytest.approx(1e-10)
    falling = calibrate._fit([(0, 1e3, 2e-6), (0, 1e4, 1.9e-6), (0, 1e5, 1.8e-6)])
    assert falling.per_byte == 0


def test_operations_are_timed_once_each() -> None:
    timer = calibrate._Timer(torch.device("cpu"))
    with timer:
        x = torch.ones(300, 300) @ torch.ones(300, 300)
        x.view(-1).sum()
    operations, seconds = timer.results()
    assert [operation.name for operation in operations] == ["ones", "ones", "mm", "sum"]
    assert operations[2].flops == 2 * 300**3
    assert len(seconds) == 4
    assert min(seconds) > 0


@pytest.mark.thorough
def test_a_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank in this process, because `calibrate` would start new processes."""
    monkeypatch.setattr(calibrate, "_SHAPES", TINY)
    monkeypatch.setattr(
        calibrate, "run_on_local_ranks", lambda _ranks, measure: [measure(_Alone())]
    )
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr(calibrate, "_UNIT_ELEMENTS", (1 << 10, 1 << 12))
    found = calibrate.calibrate([1], lambda _part: None)
    found.write(tmp_path / "machine.json")
    machine = CalibratedMachine.read(tmp_path / "machine.json")
    assert {"mm/4", "mm/2", "gelu/4", "attention/2", "memory/4"} <= set(machine.measured.operations)
    assert set(machine.measured.collectives) >= {"cast/2", "gather/2", "reduce/4"}
    assert "dequantize_nf4/4" in machine.measured.operations
    assert machine.measured.unit_seconds > 0
    assert machine.measured.trained_seconds > 0
    assert machine.measured.parameter_seconds > 0
    assert "us per operation" in machine.measured.summary()


class _Alone:
    """A world that has only this process."""

    rank, size, device = 0, 1, torch.device("cpu")

    def gather(self, value: object) -> list[object]:
        return [value]
