"""Code blocks of Markdown files: which of them run, what they are, and how they run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("python", "console", "text")
# A fenced block, with the HTML comment right above it if there is one.
BLOCK = re.compile(
    r"(?:^<!--(?P<comment>.*?)-->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"\s*not run: (?P<reason>.*\S)\s*", re.DOTALL)
COMMAND_SECONDS = 300
FILE_NAME = re.compile(r"# (\S+\.py)\n")


@dataclass(frozen=True)
class Snippet:
    """One fenced code block."""

    line: int  # of its first line of code, from 1
    language: str
    code: str
    reason: str = ""  # why it does not run; empty if it does

    @property
    def runs(self) -> bool:
        return self.language != "text" and not self.reason

    @property
    def file_name(self) -> str:
        """The file that a block of Python is the content of: its first line, as in `# check.py`."""
        found = FILE_NAME.match(self.code)
        return found[1] if found else ""

    @property
    def commands(self) -> list[str]:
        """The lines of a console block after `$ `."""
        code = self.code.replace("\\\n", "")  # a command on several lines
        return [line[2:] for line in code.splitlines() if line.startswith("$ ")]


def snippets_in(text: str) -> list[Snippet]:
    return [_snippet(text, found) for found in BLOCK.finditer(text)]


def snippets_of(path: Path) -> list[Snippet]:
    return snippets_in(path.read_text(encoding="utf-8"))


def write_files(snippets: Iterable[Snippet], folder: Path) -> None:
    """Write the files that blocks are the content of."""
    for snippet in snippets:
        if snippet.file_name:
            (folder / snippet.file_name).write_text(snippet.code, encoding="utf-8")


def run_python(
    snippets: Iterable[Snippet], path: Path, names: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the blocks of Python in one namespace; tracebacks show the lines of the file.

    Args:
        snippets: of the file.
        path: of the file.
        names: what the namespace has at first, as an earlier call returned it.

    Returns:
        The namespace.
    """
    namespace = {**(names or {}), "__name__": path.stem}
    for snippet in snippets:
        if snippet.runs and snippet.language == "python":
            padded = "\n" * (snippet.line - 1) + snippet.code
            exec(compile(padded, str(path), "exec"), namespace)
    return namespace


def run_command(command: str, folder: Path) -> None:
    """Run a command of a console block in a shell; it has to succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _snippet(text: str, found: re.Match[str]) -> Snippet:
    mark = NOT_RUN.fullmatch(found["comment"] or "")
    return Snippet(
        line=text.count("\n", 0, found.start("code")) + 1,
        language=found["language"],
        code=found["code"],
        reason=mark["reason"] if mark else "",
    )
