"""The page of `shardwise report` in a real browser: it draws, and answers mouse and keyboard."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.page.charts import Chart, Series
from shardwise.recording.format import RankRecording
from shardwise.report import page as pages
from shardwise.report.summary import summarize
from tests.report.chromium import Page, find_chromium, open_browser
from tests.report.synthetic import EVIL, FINDING, Run, record_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is on the PATH"),
]
CHARTS = [Chart("Loss", "", [Series("training", [1.0, 2.0, 3.0], [3.0, 2.0, 1.5])])]


def write(path: Path, ranks: tuple[RankRecording, ...], title: str = "run") -> Path:
    path.write_text(pages.render(title, ranks, summarize(ranks), [FINDING], CHARTS), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(world_size=12, num_blocks=8, num_steps=2, slowness={2: 1.5})
    return write(tmp_path_factory.mktemp("report") / "report.html", record_run(run))


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    browser.show(report)
    yield browser
    assert browser.problems == []


def visible_range(page: Page) -> tuple[float, float]:
    """Return the visible range in milliseconds."""
    scales = {"s": 1e3, "ms": 1.0, "µs": 1e-3}
    low, high = re.findall(r"([\d.]+) (s|ms|µs)", page.text("#range"))
    return float(low[0]) * scales[low[1]], float(high[0]) * scales[high[1]]


def visible_width(page: Page) -> float:
    low, high = visible_range(page)
    return high - low


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (2560, True)])
def test_the_page_draws_at_any_width_and_theme(
    browser: Page, report: Path, width: int, dark: bool
) -> None:
    browser.show(report, width=width, dark=dark)
    assert browser.problems == []
    assert browser.get("document.documentElement.scrollWidth") == width
    for canvas in ("#timeline-canvas", "#memory-canvas", "#charts canvas"):
        assert browser.num_colors(canvas) > 3
    background = browser.get("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(21, 23, 26)") is dark


def test_keys_buttons_and_wheel_zoom_and_pan(page: Page) -> None:
    whole = visible_range(page)
    page.click("#zoom-in")
    assert visible_width(page) == pytest.approx((whole[1] - whole[0]) / 1.6, rel=0.01)
    page.get("document.querySelector('#scroller').focus()")
    before = visible_range(page)
    page.press("ArrowRight")
    assert visible_range(page)[0] > before[0]
    page.press("ArrowLeft")
    page.press("ArrowUp")
    assert visible_width(page) < before[1] - before[0]
    page.press("Home")
    assert visible_range(page) == whole
    x, y = page.middle("#scroller")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)
    zoomed = visible_range(page)
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    page.mouse("mousePressed", x, y)
    page.mouse("mouseMoved", x - 80, y, buttons=1)
    page.mouse("mouseReleased", x - 80, y)
    assert visible_range(page)[0] > zoomed[0]
    page.click("#fit")
    assert visible_range(page) == whole


def test_bars_say_what_they_are(page: Page) -> None:
    page.get("document.querySelector('#scroller').focus()")
    page.press(".")
    assert page.text("#selected").startswith("exposed wait for the gather of (root): ")
    page.press(".")
    assert page.text("#selected").startswith("forward of (root): ")
    whole = visible_width(page)
    page.press("Enter")
    assert visible_width(page) < whole
    page.click("#fit")
    page.click("#longest")
    assert "exposed wait for the" in page.text("#selected")
    assert visible_width(page) < whole
    page.click("#fit")
    x, y = page.middle("#scroller")
    page.mouse("mouseMoved", x, y)
    assert re.search(r" of .+: .+, at .+ on rank \d+", page.text("#tooltip"))


def test_ranks_steps_and_units_are_chosen(page: Page) -> None:
    height = page.get("document.querySelector('#scroller').clientHeight")
    page.type("#rank-filter", "1-2, 7")
    assert page.get("document.querySelector('#scroller').clientHeight") < height
    page.type("#rank-filter", "first")
    assert "got first" in page.text("#rank-filter-error")
    page.type("#rank-filter", "99")
    assert "this run has 12" in page.text("#rank-filter-error")
    page.get("""(() => {
      const select = document.querySelector("#step");
      select.value = "0";
      select.dispatchEvent(new Event("change"));
    })()""")
    page.click("#findings [data-unit]")
    assert page.get("document.querySelector('#unit').value") == "1"
    page.click("#ranks [data-rank='5']")
    assert page.get("document.querySelector('#memory-rank').value") == "5"
    assert page.get("document.querySelector('#rank-filter').value") == "all"


def test_tables_sort_and_filter(page: Page) -> None:
    names = "[...document.querySelectorAll('#units-table tbody tr:not([hidden])')]"
    names += ".map((row) => row.dataset.name)"
    page.type("#unit-filter", "LAYERS.3")
    assert page.get(names) == ["layers.3"]
    assert page.text("#unit-count") == "1 of 9 units"
    page.type("#unit-filter", "")
    page.click("#units-table th:nth-child(3) button")
    heading = "document.querySelector('#units-table th:nth-child(3)')"
    assert page.get(f"{heading}.getAttribute('aria-sort')") == "descending"
    assert page.get(names)[0] == "(root)"
    page.click("#units-table th:nth-child(3) button")
    assert page.get(names)[-1] == "(root)"


def test_everything_that_can_be_focused_has_a_name(page: Page) -> None:
    nameless = page.get("""[...document.querySelectorAll("button, select, input, a, [tabindex]")]
      .filter((one) => !one.textContent.trim() && !one.labels?.length && !one.ariaLabel
        && !one.getAttribute("aria-labelledby"))
      .map((one) => one.outerHTML)""")
    assert nameless == []


@pytest.mark.thorough
def test_64_ranks_with_100_000_events_open_at_once(browser: Page, tmp_path: Path) -> None:
    """CPU time is measured, because elapsed time depends on the load of the machine."""
    ranks = record_run(Run(world_size=64, num_blocks=40, num_steps=4, slowness={5: 1.3}))
    assert sum(len(rank.events) for rank in ranks) > 100_000
    path = write(tmp_path / "large.html", ranks)
    before = browser.cpu_seconds()
    browser.show(path)
    opened = browser.cpu_seconds()
    assert opened - before < 30.0, "on an idle machine, it is less than 3"
    for number in range(20):
        browser.click("#zoom-out" if number % 2 else "#zoom-in")
    assert browser.cpu_seconds() - opened < 20 * 2.0, "on an idle machine, less than 0.2 each"
    assert browser.problems == []


def test_names_of_units_are_text(browser: Page, tmp_path: Path) -> None:
    ranks = record_run(Run(num_blocks=1, labels=[EVIL]))
    browser.show(write(tmp_path / "evil.html", ranks, title=EVIL))
    assert browser.text("h1") == EVIL
    assert browser.text("#units-table tbody tr:nth-child(2) button") == EVIL
    assert browser.text("#unit option:nth-child(3)") == EVIL
    assert browser.problems == []
