"""``python -m benchmarks.host``: all engines are timed and counted."""

import json
from pathlib import Path

import pytest
from benchmarks.host import main

from tests.forked import CONTEXT, choose_imports_of_server


def test_a_step_is_counted_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_imports_of_server()
    monkeypatch.setattr("benchmarks.host.get_context", lambda _: CONTEXT)  # which has torch
    out = tmp_path / "host.json"
    main(["--ranks", "1024", "--units", "2", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    alone, fsdp2, ours, _ = rows.values()
    assert alone["collectives"] == 0
    assert fsdp2["collectives"] == 3  # gathered twice, and reduced
    # The last unit is gathered once; ranks agree on unused parameters.
    assert ours["collectives"] == (2 * 3 - 1 + 1) / 2
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["syncs"] == 0
