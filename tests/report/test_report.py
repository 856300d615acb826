"""The contents of the page and the tables of `shardwise report`, without a browser."""

import base64
import gzip
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shardwise.cli import main
from shardwise.page.charts import read_charts
from shardwise.page.timeline import BarKind, Timeline, Track
from shardwise.recording.format import RankRecording
from shardwise.report import page
from shardwise.report.summary import summarize
from shardwise.report.terminal import show
from shardwise.schedule.events import EventKind
from tests.report.synthetic import EVIL, FINDING, Run, record_run, write_run

RANKS = record_run(Run(slowness={2: 1.5}))


class Scripts(HTMLParser):
    """Collects the texts of a page's scripts by id, and all URLs in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.addresses: list[str] = []
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._id = (found.get("id") or found.get("type")) if tag == "script" else None
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]

    def handle_data(self, data: str) -> None:
        if self._id is not None:
            self.texts[self._id] = self.texts.get(self._id, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._id = None if tag == "script" else self._id


def render(ranks: tuple[RankRecording, ...] = RANKS, title: str = "run") -> str:
    return page.render(title, ranks, summarize(ranks), [FINDING], [])


def test_bars_are_a_step_without_gaps() -> None:
    rank, timeline = RANKS[0], Timeline(RANKS[0])
    totals = rank.steps[1]
    bars = [bar for bar in timeline.bars(1) if bar.track is Track.COMPUTE]
    waits = [bar for bar in bars if bar.kind in (BarKind.WAIT_GATHER, BarKind.WAIT_REDUCE)]
    lasted = sum(bar.ended - bar.began for bar in bars)
    before = next(bar.began for bar in bars) - totals.began  # launches of the first gathers
    assert lasted + before == pytest.approx(totals.seconds)
    assert sum(bar.ended - bar.began for bar in waits) == pytest.approx(totals.exposed_seconds)
    gathers = [event for event in rank.events if event.step == 1 and event.spans]
    assert len(gathers) == sum(bar.track is not Track.COMPUTE for bar in timeline.bars(1))


def test_a_summary_names_the_straggler_and_the_peak() -> None:
    summary = summarize(RANKS)
    assert summary.straggler == 2
    assert summary.steps == (0, 1, 2)
    assert summary.exposed_seconds == pytest.approx(
        np.mean([step.exposed_seconds for rank in RANKS for step in rank.steps])
    )
    assert summary.peak is not None
    most = max(sample.total for rank in RANKS for sample in rank.memory)
    assert summary.peak[1].total == most
    assert summarize(record_run(Run())).straggler is None


def test_time_per_unit_is_that_of_its_events() -> None:
    summary = summarize(RANKS)
    for unit in summary.units:
        waits = [
            event.seconds
            for rank in RANKS
            for event in rank.events
            if event.unit == unit.index and event.event is EventKind.WAIT
        ]
        assert unit.seconds[BarKind.WAIT_GATHER] == pytest.approx(math.fsum(waits) / 3 / len(RANKS))


def test_columns_hold_every_bar_and_every_sample() -> None:
    scripts = Scripts(render())
    index = json.loads(scripts.texts["index"])
    assert [step["step"] for step in index["steps"]] == [0, 1, 2]
    step = index["steps"][1]
    columns = gzip.decompress(base64.b64decode(scripts.texts["step-1"]))
    num_bars, num_samples = sum(map(sum, step["bars"])), sum(step["samples"])
    assert len(columns) == num_bars * (3 * 4 + 2 + 1) + num_samples * (7 * 4 + 2)
    began = np.frombuffer(columns, np.uint32, num_bars) * (step["seconds"] / (2**32 - 1))
    first = step["bars"][0][0]
    timeline = Timeline(RANKS[0])
    expected = sorted(
        bar.began
        for bar in (*timeline.bars(1), *timeline.bars_around(1))
        if bar.track is Track.COMPUTE
    )
    start = min(next(iter(Timeline(rank).bars(1))).began for rank in RANKS)
    launches = [e.spans[0][0] for r in RANKS for e in r.events if e.step == 1 and e.spans]
    origin = min(start, *launches)
    assert began[:first] == pytest.approx(np.array(expected) - origin, abs=1e-9)


def test_a_page_needs_nothing_else() -> None:
    scripts = Scripts(render())
    assert all(address.startswith(("#", "data:")) for address in scripts.addresses)
    assert not re.search(r"https?://", render())
    modules: dict[str, str] = json.loads(scripts.texts["importmap"])["imports"]
    imported = set(re.findall(r'from "(\w+)"', scripts.texts["module"]))
    for url in modules.values():
        source = base64.b64decode(url.partition(",")[2]).decode()
        imported |= set(re.findall(r'from "(\w+)"', source))
    assert imported == set(modules)


def test_long_runs_have_timelines_of_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_STEPS", 5)
    ranks = record_run(Run(world_size=2, num_blocks=1, num_steps=12))
    slowest = max(range(12), key=lambda step: max(rank.steps[step].seconds for rank in ranks))
    drawn = [step["step"] for step in json.loads(Scripts(render(ranks)).texts["index"])["steps"]]
    assert drawn == sorted({0, 3, 6, 9, slowest})


def test_names_cannot_break_out_of_the_page() -> None:
    ranks = record_run(Run(num_blocks=1, labels=[EVIL]))
    text = render(ranks, title=EVIL)
    assert "alert(1)</script>" not in text
    assert "<b>'" not in text
    scripts = Scripts(text)
    assert json.loads(scripts.texts["index"])["labels"][1] == EVIL


def test_the_page_says_what_the_findings_say() -> None:
    text = render()
    assert "units 3 to 12 wait 41 ms a step for gathers: raise prefetch to 2" in text
    assert '<button data-unit="1">Show layers.0</button>' in text
    assert '<button data-rank="2">Show rank 2</button>' in text


def read(directory: Path, *records: dict[str, Any], tail: str = "") -> dict[str, Any]:
    lines = "".join(json.dumps(record) + "\n" for record in records) + tail
    (directory / "metrics.jsonl").write_text(lines)
    return {chart.title: chart for chart in read_charts(directory, RANKS)}


def test_charts_are_of_what_was_logged(tmp_path: Path) -> None:
    first = {"step": 1, "loss": 2.0, "tokens_per_second": 10.0, "grad_norm": math.nan}
    charts = read(tmp_path, first, {"step": 2, "loss": 1.5, "validation_loss": 1.7}, tail='{"st')
    assert list(charts) == ["Loss", "Throughput", "Time of a step"]
    assert [line.y for line in charts["Loss"].lines] == [[2.0, 1.5], [1.7]]


def test_long_runs_are_drawn_as_means(tmp_path: Path) -> None:
    charts = read(tmp_path, *({"step": n, "loss": float(n)} for n in range(5000)))
    (line,) = charts["Loss"].lines
    assert len(line.x) == math.ceil(5000 / 3)
    assert line.y[:2] == [1.0, 4.0]


def test_the_command_writes_the_page_and_prints_tables_of_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path, RANKS)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 2 is the straggler" in out.replace("\n", " ")
    assert max(map(len, out.splitlines())) <= max(100, len(str(tmp_path)) + 30)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    other = tmp_path / "other.html"
    assert main(["report", str(tmp_path), "--output", str(other)]) == 0
    assert other.exists()


def test_the_report_names_replicas_that_left_and_came_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, RANKS)
    left = {"step": 2, "seconds": 4.0, "goodput": 0.5, "left": [1], "lost_seconds": 3.0}
    joined = {"step": 5, "seconds": 8.0, "goodput": 0.75, "joined": [1], "lost_seconds": 0.5}
    charts = read(
        tmp_path, {"step": 1, "seconds": 1.0, "goodput": 1.0, "replicas": 2}, left, joined
    )
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = "replicas: 1 left, 1 joined; 3.5 s and 0 repeated steps lost; goodput 75.0%"
    assert "step 2: replica 1 left; 3.0 s lost" in lines
    assert "step 5: replica 1 came back after 3 steps, 4 s; 0.5 s lost" in lines
    assert total in lines
    assert charts["Goodput"].note == total


@pytest.mark.parametrize("option", ["--output", "--trace"])
@pytest.mark.parametrize("name", ["missing/file", "recording"])
def test_an_output_that_cannot_be_written_is_a_usage_error(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, RANKS)
    path = tmp_path / name
    assert main(["report", str(tmp_path), option, str(path)]) == 2
    assert f"{path}: cannot be written" in capsys.readouterr().err


def test_findings_in_the_terminal_say_what_they_save() -> None:
    out = StringIO()
    ranks = record_run(Run(num_blocks=30, num_steps=1))
    show(Console(file=out, width=100), summarize(ranks), [FINDING])
    text = out.getvalue()
    assert "units 3 to 12 wait 41 ms a step for gathers" in text
    assert "saves 2.00 ms (" in text
    assert "costs 180.0 MB" in text
    assert "11 more on the page" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_not_a_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no recording" in capsys.readouterr().err
    cut = [replace(rank, steps=()) for rank in RANKS]
    write_run(tmp_path, cut)
    assert main(["report", str(tmp_path)]) == 1
    assert "no step was recorded with its events on all ranks" in capsys.readouterr().err
