"""The scripts of benchmarks/ run, and write their figures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import checkpoints, guard, initialize, padding, recording

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
