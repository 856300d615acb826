"""Runs `shardwise plan` in this process."""

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from shardwise.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str


def run(*arguments: str) -> Result:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(["plan", *arguments])
    return Result(code, output.getvalue(), errors.getvalue())
