"""``benchmarks.host`` and ``benchmarks.exposed``: all engines are timed, counted and recorded."""

import json
from functools import partial
from pathlib import Path

import pytest
from benchmarks import exposed, host

from tests.forked import CONTEXT, choose_imports_of_server, run_forked


def test_a_step_is_counted_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_imports_of_server()
    monkeypatch.setattr("benchmarks.host.get_context", lambda _: CONTEXT)  # which has torch
    out = tmp_path / "host.json"
    host.main(["--ranks", "1024", "--units", "2", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    alone, fsdp2, ours, _ = rows.values()
    assert alone["collectives"] == 0
    assert fsdp2["collectives"] == 3  # gathered twice, and reduced
    # The last unit is gathered once; ranks agree on unused parameters.
    assert ours["collectives"] == (2 * 3 - 1 + 1) / 2
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["syncs"] == 0


def test_collectives_are_exposed_where_nothing_else_runs() -> None:
    sent = 10.0
    tasks = [exposed.Task(1.0, set()), exposed.Task(0.0, {0}, sent), exposed.Task(2.0, {0})]
    graph = exposed.Graph([*tasks, exposed.Task(1.0, {1, 2})])
    assert graph.play(None) == 4
    assert graph.play(bytes_per_second=sent) == 4, "beside the third task"
    assert graph.play(bytes_per_second=1.0) == 12 + exposed.COLLECTIVE_SECONDS


def test_collectives_share_the_network() -> None:
    graph = exposed.Graph([exposed.Task(0.0, set(), 1.0), exposed.Task(0.0, set(), 1.0)])
    assert graph.play(bytes_per_second=1.0) == 2 + 2 * exposed.COLLECTIVE_SECONDS


def test_a_network_that_is_fast_enough_is_hidden(tmp_path: Path) -> None:
    out = tmp_path / "exposed.json"
    words = ["--layers", "2", "--batch", "1", "--out", str(out)]
    run_forked(partial(exposed.main, words))
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    for row in rows.values():
        assert row["360 GB/s exposed"] <= row["80 GB/s exposed"]
    assert rows["alone-bf16"]["80 GB/s exposed"] == 0
    assert rows["shardwise-fsdp"]["overhead"] < rows["fsdp2"]["overhead"], "it copies less"
