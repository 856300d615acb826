"""The scripts of benchmarks/ run, and write their figures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import checkpoints, forecast, guard, initialize, padding, recording

from tests.forecast.test_calibrated import calibration
from tests.pooled import run_on_pool

SCRIPTS: dict[str, tuple[Callable[[], None], str, set[str]]] = {
    "checkpoints": (
        checkpoints.main,
        "--size 0 --rounds 1",
        {"shardwise", "dcp", "torch.save", "bare"},
    ),
    "guard": (guard.main, "--width 32 --rounds 1", {"note where the rank is", "together"}),
    "initialize": (
        initialize.main,
        "--parameters tiny --ranks 2",
        {"meta", "whole", "eager"},
    ),
    "padding": (padding.main, "", {"Llama-3-8B, element, 8 ranks"}),
    "recording": (
        recording.main,
        "--width 32 --layers 1 --rounds 1",
        {"no ledger", "details", "by default"},
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_writes_its_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, options, rows = SCRIPTS[name]
    out = tmp_path / "out.json"
    monkeypatch.setattr("shardwise.bench.harness.run_on_local_ranks", run_on_pool)
    monkeypatch.setattr(sys, "argv", [name, *options.split(), "--out", str(out)])
    main()
    written = json.loads(out.read_text(encoding="utf-8"))
    assert rows <= set(written["rows"])
    assert written["machine"]["torch"]
    if name == "initialize":
        assert written["rows"]["meta"]["same_bits_as_whole"]


@pytest.mark.thorough
def test_the_forecast_of_bytes_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, machine = tmp_path / "out.json", tmp_path / "machine.json"
    calibration().write(machine)
    monkeypatch.setattr("shardwise.bench.harness.run_on_local_ranks", run_on_pool)
    options = f"--sizes 0 --ranks 2 --rounds 1 --machine {machine} --out {out}"
    monkeypatch.setattr(sys, "argv", ["forecast", *options.split()])
    forecast.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {"0 2 fsdp fp32", "0 2 zero2 fp32", "0 2 ddp fp32 checkpointed"} <= set(rows)
    for row in rows.values():
        assert row["predicted sent_bytes"] == row["sent_bytes"]
        assert row["predicted seconds"] > 0
