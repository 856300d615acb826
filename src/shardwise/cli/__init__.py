"""The command line, with one small file for each command.

All commands use the same exit codes:

- 0: success;
- 1: a check found differences or damage, or the run failed;
- 2: a usage or configuration error, such as a missing file, with one line on stderr; nothing was
  started;
- 130: interrupted by SIGINT (128 + the number of any other signal);
- 141: the reader of the output has closed it, as in ``shardwise plan --help | head -1``.

A command imports torch when it runs, so that ``shardwise --help`` is fast.
"""

import os
import select
import sys
from collections.abc import Sequence
from typing import Annotated, TextIO, cast

import typer
from typer.main import get_command

from shardwise import __version__
from shardwise.cli.bench import bench
from shardwise.cli.doctor import doctor
from shardwise.cli.export import export
from shardwise.cli.plan import plan
from shardwise.cli.report import report
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.errors import CheckpointNotFound, ConfigError, PlanError, ShardwiseError

__all__ = ["app", "main"]

FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
# The base class of typer's usage errors. It is click's, but some versions of typer contain a copy
# of click, so only this expression finds it in all versions.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])

app = typer.Typer(
    name="shardwise",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph, and keeps text in [brackets]
)
for command in (bench, train, verify, doctor, export, report, plan):  # the order of the help
    app.command()(command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Fully Sharded Data Parallel training for PyTorch.

    Exit codes: 0 success; 1 a check found differences, or the run failed; 2 a usage or
    configuration error; 130 interrupted.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed:  # a connection of the command
            raise
        for stream in closed:  # Python flushes both when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return PIPE_CLOSED
    return code


def _is_closed_pipe(stream: TextIO) -> bool:
    """Whether ``stream`` is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(stream, select.POLLERR)
    except (OSError, ValueError):  # not a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    command = get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with command.make_context("shardwise", given or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt as stop:
        return _fail("; ".join(["interrupted", *map(str, stop.args)]), INTERRUPTED)
    except (PlanError, ConfigError, CheckpointNotFound) as error:
        return _fail(" ".join(str(error).split()), BAD_INPUT)
    except ShardwiseError as error:
        return _fail(str(error), FAILED)
    except UsageError as error:
        return _fail(error.format_message(), BAD_INPUT)
    return 0


def _fail(message: str, code: int) -> int:
    typer.echo(f"shardwise: {message}", err=True)
    return code
