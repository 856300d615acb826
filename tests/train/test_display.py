"""The output of a run."""

import io

import pytest
from rich.console import Console

from shardwise.plan.plan import Plan
from shardwise.train.build import memory_of
from shardwise.train.config import Config
from shardwise.train.display import ProgressSink, memory_table, units_table
from shardwise.train.sinks import StepMetrics


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, height=20)


def shown(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def rows(target: Console) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown(target).splitlines()]


def record(step: int, validation_loss: float | None = None) -> StepMetrics:
    return StepMetrics(step, 6.0 / step, 0.5, 1e-3, 1000 * step, 500.0, 2.0 * step, validation_loss)


def test_equal_units_share_a_row(plan: Plan) -> None:
    target = console()
    target.print(units_table(plan))
    assert ["GPT", "8,224", "32.9 kB", "8.2 kB"] in rows(target)
    assert ["blocks.0 to blocks.1", "2 x 12,352", "2 x 49.4 kB", "2 x 12.4 kB"] in rows(target)
    assert ["model", "32,928", "131.7 kB", "32.9 kB"] in rows(target)


def test_memory_of_a_rank_and_of_one_process(config: Config) -> None:
    target = console()
    rank, process = memory_of(config, "cuda")
    target.print(memory_table("memory", rank, process, 4))
    assert ["optimizer states", "65.9 kB", "263.4 kB"] in rows(target)
    assert ["total", f"{sum(rank.values()) / 1000:.1f} kB", "526.8 kB"] in rows(target)
    assert "a rank (of 4)" in shown(target)


def test_without_a_terminal_some_steps_are_lines() -> None:
    target = console()
    sink = ProgressSink(target, steps=23, log_every=10)
    for step in range(1, 24):
        sink.log(record(step))
    sink.close()
    lines = shown(target).splitlines()
    assert [line.split()[1] for line in lines] == ["1/23", "10/23", "20/23", "23/23"]
    assert lines[1].startswith("step 10/23  loss 0.600  500 tokens/s  grad norm 0.50  0:00:0")
    assert lines[3].endswith("0:00:00 left")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_validation_has_its_own_line(terminal: bool) -> None:
    target = console(terminal=terminal)
    sink = ProgressSink(target, steps=20, log_every=10)
    sink.log(record(7, validation_loss=1.25))
    sink.close()
    assert "step 7: validation loss 1.250\n" in shown(target)


def test_a_terminal_has_a_bar() -> None:
    target = console(terminal=True)
    sink = ProgressSink(target, steps=20, log_every=1)
    for step in range(1, 21):
        sink.log(record(step))
    sink.close()
    drawn = shown(target)
    assert "20/20" in drawn
    assert "━" in drawn
    assert "loss 0.300  500 tokens/s  grad norm 0.50 " in drawn
    assert drawn.count("step ") == 0
