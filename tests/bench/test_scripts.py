"""The scripts of benchmarks/ run, and write their figures."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import (
    adapters,
    checkpoints,
    forecast,
    guard,
    host_step,
    hostccl,
    initialize,
    padding,
    publish,
    recording,
    reproducible,
)
from benchmarks.forecast_page import BEGIN, END, table

from shardwise.forecast.machines.calibrated import RanksCalibration
from shardwise.launch.world import World
from tests.forecast.calibrations import calibration
from tests.pooled import run_on_pool

SCRIPTS: dict[str, tuple[Callable[[], None], str, set[str]]] = {
    "checkpoints": (
        checkpoints.main,
        "--size 0 --rounds 1",
        {"shardwise", "dcp", "torch.save", "bare"},
    ),
    "guard": (guard.main, "--width 32 --rounds 1", {"note where the rank is", "together"}),
    "host_step": (
        host_step.main,
        "--width 32 --rounds 1 --threads 2",
        {"fused, 1 thread", "fused, 2 threads", "foreach, 1 thread", "loop, 2 threads"},
    ),
    "hostccl": (
        hostccl.main,
        "--width 64 --layers 1 --rounds 1",
        {"ddp on gloo", "fsdp2 on hostccl", "all-reduce on hostccl", "shardwise-fsdp"},
    ),
    "initialize": (
        initialize.main,
        "--parameters tiny --ranks 2",
        {"meta", "whole", "eager"},
    ),
    "padding": (padding.main, "", {"Llama-3-8B, element, 8 ranks"}),
    "publish": (
        publish.main,
        "--width 32 --layers 1 --rounds 1",
        {"full_tensors, one rank", "publish, only changed", "torch, all ranks"},
    ),
    "reproducible": (
        reproducible.main,
        "--width 32 --rounds 1",
        {"fsdp", "zero2", "ddp"},
    ),
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
def test_steps_with_adapters_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("shardwise.bench.harness.run_on_local_ranks", run_on_pool)
    monkeypatch.setattr(sys, "argv", [*f"x --models tiny --rounds 1 --out {out}".split()])
    adapters.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert set(rows) == {"tiny whole", "tiny LoRA", "tiny QLoRA"}
    assert all(row["predicted"] > 0 < row["seconds"] for row in rows.values())


@pytest.mark.thorough
def test_the_forecast_of_bytes_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr("shardwise.bench.harness.run_on_local_ranks", run_on_pool)
    monkeypatch.setattr(forecast, "measure_ranks", measured_ranks)
    options = f"--models tiny --ranks 2 --rounds 2 --out {out} --page {page}"
    monkeypatch.setattr(sys, "argv", ["forecast", *options.split()])
    forecast.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {"tiny 2 fsdp fp32", "tiny 2 zero2 fp32", "tiny 2 ddp fp32 checkpointed"} <= set(rows)
    for name, row in rows.items():
        assert ("sent_bytes" in row) == ("micro-batches" not in name)
        assert row.get("predicted sent_bytes") == row.get("sent_bytes")
        assert row["predicted seconds"] > 0
        assert len(row["rounds"]) == 2
    monkeypatch.setattr(sys, "argv", ["forecast", "--figures", str(out), "--page", str(page)])
    written = page.read_text(encoding="utf-8")
    forecast.main()
    assert page.read_text(encoding="utf-8") == written
    assert written.startswith(f"before\n{BEGIN}")
    assert written.endswith(f"{END}\nafter\n")
    assert "tiny 2 zero2 fp32" in written
    assert "old" not in written


def measured_ranks(world: World, times: int, steps: int) -> RanksCalibration:
    """A calibration that takes no time."""
    del times, steps
    return calibration().ranks[world.size]


def test_the_table_of_forecasts_names_the_worst_case_and_the_range_over_rounds() -> None:
    def row(ratios: Sequence[float]) -> dict[str, Any]:
        seconds = {"predicted seconds": 1.0, "seconds": 1.0, "seconds error": ratios[1] - 1}
        memory = {"predicted live_peak": 99e6, "live_peak": 100e6, "live_peak error": -0.01}
        return seconds | memory | {"rounds": [[ratio, 1.0] for ratio in ratios]}

    sent = {"sent_bytes": 2e6, "predicted sent_bytes": 2e6}
    found = table({"one": row([0.9, 1.0, 1.2]), "two": row([0.7, 0.8, 0.9]) | sent})
    assert "| one | - | 99, 100 | -1.0% | 1000, 1000 | +0% | -10% to +20% of 3 |" in found
    assert "Time: 1 of 2 cases are within 15%; the worst is two (-20%)." in found
    assert "exact in 1 of 1 cases" in found
