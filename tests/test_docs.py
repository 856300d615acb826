"""The tests that the documentation names exist, and so do the places that it links to.

A test's name may be cut short, as in `test_a_rank_…`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.build.markdown import anchors_of, links_of

TESTS = Path(__file__).parent
DOCUMENTS = [TESTS.parent / "README.md", *sorted((TESTS.parent / "docs").glob("*.md"))]
LINKING = [*DOCUMENTS, TESTS.parent / "CHANGELOG.md", TESTS / "README.md"]
ABBREVIATIONS = {"traps/": "runtime/traps/"}  # as docs/design.md says
FILE = re.compile(r"(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+)(…?))?")
PYTORCHS = re.compile(r"`test_\w+\.py: ")  # how porting.md names PyTorch's own tests
MODULE = re.compile(r"-m ((?:shardwise|benchmarks|tests)\b[\w.]*\w)")  # of this repository
NAME = re.compile(r"()(test_\w+?)(…?)")  # in the file that was named last


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    missing = [
        f"{document.name}:{number}: {quoted}"
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        for quoted in missing_in(line)
    ]
    assert missing == []


def missing_in(line: str) -> Iterator[str]:
    """What ``line`` quotes as a file of tests, or as a test, and is none."""
    if PYTORCHS.search(line):
        return
    content = ""
    for quoted in re.findall(r"`([^`]+)`", line):
        found = FILE.fullmatch(quoted) or NAME.fullmatch(quoted)
        if found is None:
            continue
        path, name, is_short = found.groups()
        if path:
            files = list(find(path))
            content = "\n".join(file.read_text(encoding="utf-8") for file in files)
        end = r"\w*\(" if is_short else r"\("
        if not content or (name and not re.search(rf"def {name}{end}", content)):
            yield quoted


def find(path: str) -> Iterator[Path]:
    """The files of tests with this path, or, if it is a name only, all with this name."""
    for short, long in ABBREVIATIONS.items():
        if path.startswith(short):
            path = long + path.removeprefix(short)
    return TESTS.rglob(path) if "/" not in path else (p for p in [TESTS / path] if p.exists())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_commands_run_exist(document: Path) -> None:
    named = MODULE.findall(document.read_text(encoding="utf-8"))
    assert [name for name in named if not is_run_by_python(name)] == []


def is_run_by_python(name: str) -> bool:
    """Whether ``python -m name`` runs a file."""
    root = TESTS.parent / ("src" if name.startswith("shardwise") else "")
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    broken = []
    for target in links_of(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text("utf-8"))):
            broken.append(target)
    assert broken == []
