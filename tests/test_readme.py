"""Every snippet of README.md and some pages runs, or says why not: `<!-- not run: reason -->`.

The Python blocks of all run in order in one namespace on two ranks, as a reader would type them.
The commands of console blocks run in a shell, in a folder with the files that Python blocks start
with the name of (`# check.py`). Other blocks (output, drawings) are of the language `text`.
"""

import contextlib
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.snippets import (
    LANGUAGES,
    run_command,
    run_python,
    snippets_in,
    snippets_of,
    write_files,
)

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
PAGES = ("options", "strategies", "how-it-works", "resume", "verify", "join")
FILES = (README, *(REPOSITORY / "docs" / f"{name}.md" for name in PAGES))
COMMANDS = [
    pytest.param(command, id=command.partition("  #")[0].strip())
    for file in FILES
    for snippet in snippets_of(file)
    if snippet.language == "console" and snippet.runs
    for command in snippet.commands
]


def test_every_snippet_has_a_language_that_says_what_to_do_with_it() -> None:
    for file in FILES:
        for snippet in snippets_of(file):
            assert snippet.language in LANGUAGES, f"{file.name}:{snippet.line - 1}: {LANGUAGES}"


@on_ranks(2)
def test_python_snippets_run_in_order(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        names = run_python(snippets_of(README), README)
        for file in FILES[1:]:
            run_python(snippets_of(file), file, names)


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_console_commands_succeed(command: str, tmp_path: Path) -> None:
    for file in FILES:
        write_files(snippets_of(file), tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    run_command(command, tmp_path)


def test_a_failing_snippet_is_shown_with_its_line_in_the_file() -> None:
    (snippet,) = snippets_in("# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_python([snippet], Path("guide.md"))
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("guide.md", 5)


def test_what_runs_of_a_file() -> None:
    text = """
<!-- not run: it needs a GPU -->
```python
a = 1
```

```console
$ shardwise plan gpt   # a command
its output
$ true
```
<!-- a remark -->
```python
# check.py
c = 3
```
```text
d
```
"""
    python, console, file, output = snippets_in(text)
    assert (python.runs, python.reason, python.line) == (False, "it needs a GPU", 4)
    assert console.runs
    assert console.commands == ["shardwise plan gpt   # a command", "true"]
    assert (file.runs, file.file_name, file.code) == (True, "check.py", "# check.py\nc = 3\n")
    assert not output.runs
