"""``shardwise bench``: a table, JSON and a plot; usage errors are one line and exit code 2."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.bench import work
from shardwise.cli import main
from shardwise.launch.world import World
from tests.pooled import run_on_pool

from .commands import fail

USAGE_ERRORS = {
    "--size 50G": "--size 50G: expected 10M, 50M, 125M or a configuration",
    "--size none.toml": "none.toml: no such file",
    "--ranks 1": "--ranks 1: expected 2 or more",
    "--ranks two": "Invalid value for '--ranks'",
    "--rounds 1": "--rounds 1: expected 2 or more",
    "--batch 0": "--batch 0: expected 1 or more",
    "--dtype bf61": "--dtype bf61: unknown; did you mean 'bf16'?",
    "--vs fsdp3": "--vs fsdp3: unknown; did you mean 'fsdp",
    "--vs ,": "--vs: expected one of ddp,",
    "--ours zero9": "--ours zero9: unknown; did you mean 'zero",
    "--ours hsdp": "--ours hsdp: expected an even number of 4 or more ranks, got --ranks 2",
    "--measure tim": "--measure tim: unknown; did you mean 'time'?",
    "--out .": "--out .: the directory is not empty",
    "--frobnicate": "No such option: --frobnicate",
}


def run_with_few_units(num_ranks: int, *args: object) -> list[object]:
    return run_on_pool(num_ranks, _call_with_few_units, *args)


def _call_with_few_units(world: World, *call: Any) -> object:
    function, *args = call
    with mock.patch.object(work, "NUM_TINY_UNITS", 10):
        return function(world, *args)


@pytest.mark.usefixtures("elsewhere")
def test_a_small_comparison(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    malloc = "MALLOC_MMAP_THRESHOLD_=1048576"
    monkeypatch.setenv(*malloc.split("="))
    monkeypatch.setattr("shardwise.bench.harness.run_on_local_ranks", run_with_few_units)
    out = tmp_path / "out"
    options = ["--vs", "ddp", "--ours", "fsdp,fsdp-outer", "--rounds", "2", "--sequence", "16"]
    measures = ["--measure", "time,traffic,units", "--out", str(out)]
    assert main(["bench", "--size", str(tiny), *options, *measures]) == 0
    printed = capfd.readouterr()
    assert "shardwise-fsdp" in printed.out
    assert malloc in printed.out
    assert "rounds were noisy" in printed.out
    # Noisy rounds do not count, so only one of the two rounds may be left.
    assert re.search("smaller differences .* not significant|too few rounds", printed.out)
    assert max(len(line) for line in printed.out.splitlines() if line[:1] in "┃│") <= 100
    assert re.search(r"traffic of shardwise-fsdp, about \d+ \w+ left in total", printed.err)
    assert (out / "bench.png").stat().st_size > 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["machine"]["torch"]
    assert results["machine"]["malloc"] == malloc
    assert results["setting"]["engines"] == ["ddp", "shardwise-fsdp", "shardwise-fsdp-outer"]
    figures = {name: row["figures"] for name, row in results["engines"].items()}
    assert [one["outer_bytes"] > 0 for one in figures.values()] == [False, False, True]
    same_losses = [one.get("same_loss") for one in figures.values()]
    assert same_losses == [1, 1, None]  # replicas train independently, so their losses differ
    assert len(results["rounds"]) == len(results["tiny_rounds"]) == 2
    ours, ddp = results["engines"]["shardwise-fsdp"], results["engines"]["ddp"]
    assert ddp["ratio"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert ours["figures"]["loss_gap"] < 1e-6
    assert ours["figures"]["busy_seconds"] > 0
    assert "busy_seconds" not in ddp["figures"]
    assert ours["figures"]["sent_bytes"] > ddp["figures"]["sent_bytes"] > 0
    assert ours["figures"]["unit_microseconds"] > 0
    assert "trimmed_peak" not in ours["figures"]


@pytest.mark.parametrize(("command_line", "message"), USAGE_ERRORS.items())
def test_a_usage_error_is_one_line(
    command_line: str, message: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "there.txt").touch()
    assert message in fail(capfd, ["bench", *command_line.split()])
    assert [path.name for path in elsewhere.iterdir()] == ["there.txt"]
