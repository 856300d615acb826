"""What people see."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.plan.plan import Plan
from shardwise.train.baselines import Baselines
from shardwise.train.config import Config
from shardwise.train.memory import foresee, one_process, one_rank
from shardwise.train.picture import draw_losses, running_mean
from shardwise.train.progress import show_steps
from shardwise.train.records import Record
from shardwise.train.tables import in_bytes, memory_table, units_table

BASELINES = Baselines(uniform=5.55, unigram=3.2, bigram=2.4)


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, height=20)


def shown(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def record(step: int, validation_loss: float | None = None) -> Record:
    return Record(step, 6.0 / step, 0.5, 1e-3, 1000 * step, 500.0, 2.0 * step, validation_loss)


def test_alike_units_share_a_row(plan: Plan) -> None:
    target = console()
    target.print(units_table(plan))
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown(target).splitlines()]
    assert ["GPT", "8,224", "32.9 kB", "8.2 kB"] in rows
    assert ["blocks.0 to blocks.1", "2 x 12,352", "2 x 49.4 kB", "2 x 12.4 kB"] in rows
    assert ["model", "32,928", "131.7 kB", "32.9 kB"] in rows


def test_a_rank_stands_beside_one_process(plan: Plan, config: Config) -> None:
    target = console()
    rank = one_rank(plan, foresee(plan, config, "cuda"))
    target.print(memory_table("memory", rank, one_process(plan), 4))
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown(target).splitlines()]
    assert ["AdamW's two states", "65.9 kB", "263.4 kB"] in rows
    assert ["total", in_bytes(rank.total), "526.8 kB"] in rows
    assert "a rank (of 4)" in shown(target)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_440_000, "3.4 MB"), (2e12, "2.0 TB")],
)
def test_bytes_as_people_read_them(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    target = console()
    steps = show_steps(target, steps=23, log_every=10)
    for step in range(1, 24):
        steps.show(record(step))
    steps.close()
    lines = shown(target).splitlines()
    assert [line.split()[1] for line in lines] == ["1/23", "10/23", "20/23", "23/23"]
    assert lines[1] == "step 10/23  loss 0.600  500 tokens/s  grad norm 0.50  0:00:26 left"
    assert lines[3].endswith("0:00:00 left")


def test_a_validation_has_a_line_of_its_own() -> None:
    target = console()
    steps = show_steps(target, steps=20, log_every=10)
    steps.show(record(7, validation_loss=1.25))
    assert shown(target) == "step 7: validation loss 1.250\n"


def test_a_terminal_has_a_bar() -> None:
    target = console(terminal=True)
    steps = show_steps(target, steps=20, log_every=1)
    for step in range(1, 21):
        steps.show(record(step))
    steps.close()
    drawn = shown(target)
    assert "20/20" in drawn
    assert "━" in drawn
    assert "loss 0.300  500 tokens/s  grad norm 0.50  0:00:00 left" in drawn
    assert drawn.count("step ") == 0


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_losses(path, "a run", [record(1), record(2), record(3, 2.5)], BASELINES)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_the_running_mean_does_not_lag() -> None:
    line = [float(step) for step in range(500)]
    assert running_mean(line) == pytest.approx(line)


def test_the_running_mean_is_smooth() -> None:
    jagged = [float(step % 2) for step in range(1000)]
    assert all(abs(mean - 0.5) < 0.05 for mean in running_mean(jagged)[20:-20])
