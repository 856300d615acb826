"""The site: where each page is, what its links are checked for, and how it looks to a browser."""

import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from docs.build.assemble import assemble
from docs.build.check import problems_of
from docs.build.literal_blocks import as_fenced
from docs.build.markdown import sections_of
from docs.build.pictures import PICTURES
from docs.build.reference import GENERATED
from docs.build.site import ROOT, SITE, build

from shardwise import public
from tests.report.chromium import Page, find_chromium, open_browser
from tests.snippets import snippets_of

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
IN_SEARCH = "[...document.querySelectorAll('*')].some((one) => one.shadowRoot?.{})"
CLIPPED_CODE = (  # the first line of each block. Output of programs has no colors, and may scroll
    "[...document.querySelectorAll('.highlight:has(code span[class]) pre > code')]"
    ".filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent.split('\\n')[0])"
)
CUT_DRAWING = (
    "[...document.querySelectorAll('p:has(> img[src$=\"sharding.svg\"])')]"
    ".filter(one => one.scrollWidth > one.clientWidth).length"
)
MAX_COLUMNS = 100  # that fit into a window of 1280 px
# Sections of README.md whose subject has a page of its own.
NOT_PLACED = {"Two commands", "Save, plan, report, verify", "Port", "Guarantees", "Documentation"}


def test_each_page_is_in_the_navigation() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} | {"changelog.md"}
    assert sorted(pages_in(CONFIG["nav"])) == sorted(pages), "nav in zensical.toml has each once"


def pages_in(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from pages_in(target) if isinstance(target, list) else [target]


def test_each_section_of_the_readme_is_on_one_page() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    sections = sections_of((ROOT / "README.md").read_text(encoding="utf-8"))
    places = {
        name: sum(text.count(f"<!-- README: {name} -->") for text in pages) for name in sections
    }
    assert places == {name: int(name not in NOT_PLACED) for name in sections}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_code_is_not_wider_than_its_box(page: Path) -> None:
    for snippet in snippets_of(page):
        for number, line in enumerate(snippet.code.splitlines(), snippet.line):
            fits = len(line) <= MAX_COLUMNS or snippet.language == "text"
            assert fits, f"{page.name}:{number}: {len(line)} columns; break it before {MAX_COLUMNS}"


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_those_that_the_command_draws(name: str) -> None:
    found = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert found == PICTURES[name]().content, "run `python -m docs.build.pictures`"


@pytest.mark.parametrize("name", GENERATED)
def test_each_part_of_the_reference_is_on_a_page(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert sum(f"<!-- generated: {name} -->" in text for text in pages) == 1
    assert len(GENERATED[name]().splitlines()) > 10


def test_each_key_of_the_configuration_is_described() -> None:
    assert [row for row in GENERATED["configuration"]().splitlines() if row.endswith("|  |")] == []


def test_each_public_name_is_in_the_reference() -> None:
    found = GENERATED["api"]()
    missing = {
        name
        for name in public.__all__
        if f"::: shardwise.public.{name}\n" not in found and f"## `sw.{name}`" not in found
    }
    assert missing == set()


def test_links_of_a_page_follow_what_was_put_into_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    readme = "# It\n\nSee [use](#use), [a](docs/a.md#b).\n\n## Use\n\n```sh\n# no heading\n```\n"
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "CHANGELOG.md").write_text("# Changes: [a](docs/a.md)\n")
    (tmp_path / "docs" / "index.md").write_text("# Home\n<!-- README: It -->\n[docs/a.md](a.md#b)")
    page = "# A\n<!-- README: Use -->\n`[x](../R.md)` [up](../README.md#use)\n<!-- generated: n -->"
    (tmp_path / "docs" / "a.md").write_text(page)
    assemble(tmp_path, tmp_path / "out", {"n": lambda: "made"})
    pages = {one.name: one.read_text() for one in (tmp_path / "out").iterdir()}
    assert pages == {
        "index.md": "# Home\nSee [use](a.md), [a](a.md#b).\n\n[A](a.md#b)",
        "a.md": "# A\n```sh\n# no heading\n```\n\n`[x](../R.md)` [up](a.md)\nmade",
        "changelog.md": "# Changes: [a](a.md)\n",
    }


def test_literal_blocks_become_fenced_ones() -> None:
    docstring = "One::\n\n    a\n\n        b\n\nTwo.\n\n::\n\n    c\n"
    expected = "One:\n\n```python\na\n\n    b\n```\n\nTwo.\n\n```python\nc\n```\n\n"
    assert as_fenced(docstring) == expected


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#no">b</a> <a href="#here">h</a>')
    (tmp_path / "b.html").write_text(
        '<a href="c.html">c</a><a href="https://example.org">far</a><img src="a.png">'
        '<script src="https://example.org/x.js"></script><link rel="canonical" href="https://e.org">'
    )
    assert problems_of(tmp_path) == [
        "a.html: b.html#no: no such anchor",
        "b.html: a.png does not exist",
        "b.html: loads https://example.org/x.js",
        "b.html: c.html does not exist",
    ]


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served; it is built for that."""
    assert build() == []
    handler = partial(_Handler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("chromium") / "profile") as page:
        page.site = address
        yield page


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is on the PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_show_without_problems_at_any_width(browser: Page, address: str, width: int) -> None:
    for name in pages_in(CONFIG["nav"]):
        browser.open(address + name.replace(".md", ".html"), width=width)
        browser.wait_for("document.readyState === 'complete'")
        assert browser.get("document.documentElement.scrollWidth <= innerWidth"), (
            f"{name} overflows"
        )
        if width == 1280:
            assert browser.get(CLIPPED_CODE) == [], f"{name} has code that is wider than its box"
        assert browser.get(CUT_DRAWING) == 0, f"{name} cuts the first drawing"
        broken = browser.get("[...document.images].filter(one => !one.naturalWidth).length")
        assert broken == 0, f"{name} has pictures that are not shown"
    assert browser.problems == []


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is on the PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_finds_a_public_name(browser: Page, address: str, width: int) -> None:
    browser.open(address + "glossary.html", width=width)
    browser.wait_for("document.readyState === 'complete'")
    browser.get("document.querySelector('.md-search__button').click()")
    browser.wait_for(IN_SEARCH.format("querySelector('input')"))
    browser.get("new Promise((done) => setTimeout(done, 500))")  # it takes the focus by then
    for letter in "clip_grad":
        browser.press(letter)
    browser.wait_for(IN_SEARCH.format("textContent.includes('clip_grad_norm_')"))
    assert browser.problems == []
