"""``shardwise doctor``; tests/checkpoint tests its checks of checkpoints."""

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.forecast.machines.calibrated import CalibratedMachine
from tests.forecast.calibrations import calibration

from .commands import fail


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected the path of a checkpoint, or --calibrate OUT.json"),
        ("x --calibrate y.json", "expected the path of a checkpoint, or --calibrate OUT.json"),
        ("--calibrate y.json --ranks two", "--ranks two: expected numbers separated by commas"),
        ("--calibrate y.json --ranks 2,0", "--ranks: expected 1 or more ranks"),
        ("--calibrate .", ".: cannot be written: it is a directory"),
        ("--calibrate no/y.json", "no/y.json: cannot be written: no is not a directory"),
    ],
)
def test_bad_input(arguments: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert message in fail(capfd, ["doctor", *arguments.split()])


def test_a_calibration_is_written_and_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.bench.calibrate.calibrate", lambda _ranks, _say: calibration())
    out = tmp_path / "machine.json"
    assert main(["doctor", "--calibrate", str(out), "--ranks", "2,4"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks: 1 thread each, float32 products 100 GFLOP/s" in printed
    assert f"written to {out}" in printed
    assert CalibratedMachine.read(out, 4).cluster.num_devices == 4
