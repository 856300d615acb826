"""The pictures of docs/report.md and docs/plan.md: ``python -m tests.report.gallery``.

They show the report of a simulated run on eight ranks, one of them slow, without prefetch, and the
plan of a model on a cluster. ``make gallery`` also draws them.
"""

import json
import math
import random
import tempfile
from pathlib import Path

from rich.console import Console

from shardwise.cli import main as run_command
from shardwise.report.report import report
from tests.report.chromium import Page, open_browser
from tests.report.synthetic import Run, record_run, write_run

PICTURES = Path(__file__).parents[2] / "docs" / "report"
PLANS = PICTURES.parent / "plan"
PLAN = ("llama-3-8b", "--cluster", "64xH100", "--seq", "8192", "--global-batch", "512")
RUN = Run(world_size=8, num_blocks=12, num_steps=4, prefetch=0, slowness={5: 1.25})


def main() -> None:
    """Draw all pictures."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "simulated-run"
        write_run(run, record_run(RUN))
        write_metrics(run / "metrics.jsonl")
        [path] = report(run, None, None, Console(quiet=True))
        plan = Path(directory) / "plan.html"
        run_command(["plan", *PLAN, "--html", str(plan)])
        with open_browser(Path(directory) / "profile") as page:
            draw(page, path)
            draw_plan(page, plan)


def draw(page: Page, path: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    page.show(path)
    page.save_picture(PICTURES / "overview.png")
    page.save_picture(PICTURES / "tables.png", ".pair")
    zoom_to_backward(page)
    page.save_picture(PICTURES / "timeline.png", "#timeline")
    page.show(path, dark=True)
    page.save_picture(PICTURES / "memory.png", "#memory")


def draw_plan(page: Page, path: Path) -> None:
    PLANS.mkdir(exist_ok=True)
    page.show(path)
    page.save_picture(PLANS / "overview.png")
    page.save_picture(PLANS / "curves.png", "#curves")
    page.show(path, dark=True)
    page.save_picture(PLANS / "memory.png", "#memory")


def zoom_to_backward(page: Page) -> None:
    """Select a unit's backward on rank 5, with the arrows from its gather and to its reduction."""
    page.type("#rank-filter", "4-6")
    x, y = page.middle("#scroller")
    page.mouse("mousePressed", x + 60, y - 4)
    page.mouse("mouseReleased", x + 60, y - 4)
    page.get("document.querySelector('#scroller').focus()")
    page.press(".")  # the event after the wait
    page.press("Enter")


def write_metrics(path: Path) -> None:
    """Write the metrics that a trainer might log in 400 steps."""
    noise = random.Random(0)
    records = []
    for step in range(1, 401):
        loss = 1.2 + 4.4 * math.exp(-step / 110)
        records.append(
            {
                "step": step,
                "loss": loss + noise.gauss(0, 0.05),
                "tokens_per_second": noise.gauss(9e5, 1.5e4),
                "mfu": noise.gauss(0.41, 0.007),
                **({"validation_loss": loss + 0.06} if step % 50 == 0 else {}),
            }
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
