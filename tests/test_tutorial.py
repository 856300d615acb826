"""Every snippet of docs/tutorial.md runs, as in README.md (tests/test_readme.py).

Its blocks of Python are files that import each other, and run in order on two ranks; its commands
run in order in one folder.
"""

import contextlib
import sys
from pathlib import Path

import pytest

from tests.ranks import run_on
from tests.snippets import LANGUAGES, run_command, run_python, snippets_of, write_files

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"


def test_every_snippet_has_a_language_and_runs() -> None:
    for snippet in snippets_of(TUTORIAL):
        assert snippet.language in LANGUAGES, f"tutorial.md:{snippet.line - 1}"
        assert snippet.runs or snippet.language == "text"


def test_python_snippets_run_in_order(tmp_path: Path) -> None:
    write_files(snippets_of(TUTORIAL), tmp_path)
    run_on(2, _run, tmp_path)


def _run(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            run_python(snippets_of(TUTORIAL), TUTORIAL)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("model", None)


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # seven processes that import torch, one after the other
def test_commands_run_in_order(tmp_path: Path) -> None:
    write_files(snippets_of(TUTORIAL), tmp_path)
    for snippet in snippets_of(TUTORIAL):
        for command in snippet.commands if snippet.language == "console" else ():
            run_command(command, tmp_path)
    assert (tmp_path / "runs" / "tutorial" / "report.html").exists()
