"""Shared by `shardwise bench` and the scripts in `benchmarks/`.

Every case is measured once per round, in rotating order, so that disturbances of the machine affect
all cases. Results are medians over the rounds, of figures and of ratios to a base case *in the same
round*. A fixed matrix product is timed before each round. Rounds in which it took long are noisy
and excluded.
"""

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from shardwise.bench.machine import describe_machine, reference_seconds
from shardwise.errors import ConfigError
from shardwise.launch.environment import read_rank_env
from shardwise.launch.local import run_on_local_ranks
from shardwise.launch.world import World
from shardwise.local_devices import num_local_accelerators

__all__ = [
    "Column",
    "Figures",
    "Range",
    "Round",
    "TimeLeft",
    "interleave",
    "largest",
    "make_console",
    "make_table",
    "medians",
    "merge",
    "ratio",
    "ratios",
    "run_ranks",
    "show_progress",
    "write_json",
]

NOISE = 1.2  # a round is noisy if its reference takes more than this times the median
WIDTH = 150  # width of tables, so that no figure is cut in a file or a narrow window

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")
Figures = dict[str, float]  # figures by name; a missing name was not measured
Column = tuple[str, str, Callable[[Any], str]]  # heading, name of the figure, format


@dataclass(frozen=True, slots=True)
class Range:
    """The median and range of one figure over rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


@dataclass(slots=True)
class Round:
    """One measurement of each case, on one rank or merged over ranks."""

    cases: dict[str, Figures]
    reference_seconds: float  # time of a fixed matrix product before the cases
    load: float  # load of the machine, averaged over the last minute
    busy_cores: float  # cores that all processes keep busy
    own_cores: float  # cores that this process or, merged, all ranks keep busy
    is_noisy: bool = False  # the reference took long, so medians exclude this round

    @property
    def others(self) -> float:
        """Cores that other processes keep busy; the process that started the ranks is idle."""
        return max(0.0, self.busy_cores - self.own_cores)


def interleave(
    cases: Mapping[str, Callable[[int], Figures]],
    rounds: int,
    *,
    title: str,
    warm_up: int = 0,
    visible: bool = True,
) -> list[Round]:
    """Measure every case once per round, in rotating order; discard ``warm_up`` rounds.

    Cases are called with the number of the round, from 0.
    """
    names, measured = tuple(cases), []
    started = time.perf_counter()
    with show_progress(title, warm_up + rounds, visible=visible) as begin:
        for number in range(warm_up + rounds):
            if number == warm_up > 0:
                left = _format_seconds((time.perf_counter() - started) / warm_up * rounds)
                begin(f"({rounds} rounds, about {left} left)")
            else:
                begin("" if number else f"({rounds} rounds)")
            start = (number - warm_up) % len(names)
            reference = reference_seconds()
            psutil.cpu_percent()  # of all processes; the next call measures from here
            began, own = time.perf_counter(), time.process_time()
            found = {name: cases[name](number) for name in (*names[start:], *names[:start])}
            seconds = time.perf_counter() - began
            own = (time.process_time() - own) / seconds
            busy, load = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1), os.getloadavg()[0]
            measured.append(Round(found, reference, load, busy, own))
    return measured[warm_up:]


def merge(
    by_rank: Sequence[Sequence[Round]], worst: Collection[str] | None = ("seconds",)
) -> list[Round]:
    """Merge the ranks of each round, and mark noisy rounds.

    Of the figures ``worst`` (None: all), the maximum over ranks counts; of others, the mean.
    """
    limit = NOISE * statistics.median(round_.reference_seconds for round_ in by_rank[0])
    return [
        Round(
            cases={name: _merge([v.cases[name] for v in views], worst) for name in views[0].cases},
            reference_seconds=views[0].reference_seconds,
            load=views[0].load,
            busy_cores=views[0].busy_cores,
            own_cores=sum(view.own_cores for view in views),
            is_noisy=views[0].reference_seconds > limit,
        )
        for views in zip(*by_rank, strict=True)
    ]


def _merge(views: Sequence[Figures], worst: Collection[str] | None) -> Figures:
    return {
        name: (max if worst is None or name in worst else statistics.fmean)(v[name] for v in views)
        for name in views[0]
    }


def largest(by_rank: Sequence[Figures]) -> Figures:
    return _merge(by_rank, None)


def medians(rounds: Sequence[Round], case: str) -> Figures:
    """Return the median of each figure of ``case`` over the rounds that were not noisy."""
    found = [round_.cases[case] for round_ in _quiet(rounds, case)]
    return {name: statistics.median(figures[name] for figures in found) for name in found[0]}


def ratio(rounds: Sequence[Round], case: str, base: str, figure: str = "seconds") -> Range:
    """Compare a figure of ``case`` to ``base`` in the same round, without noisy rounds."""
    found = ratios(rounds, case, base, figure)
    return Range(statistics.median(found), min(found), max(found))


def ratios(rounds: Sequence[Round], case: str, base: str, figure: str = "seconds") -> list[float]:
    """Return the ratio of a figure of ``case`` to ``base`` in each round that was not noisy."""
    pairs = [(round_.cases[case], round_.cases[base]) for round_ in _quiet(rounds, case)]
    return [own[figure] / reference[figure] for own, reference in pairs]


def _quiet(rounds: Sequence[Round], case: str) -> list[Round]:
    return [round_ for round_ in rounds if case in round_.cases and not round_.is_noisy]


def run_ranks(
    num_ranks: int, function: Callable[[World, *Arguments], T], *args: *Arguments
) -> list[T]:
    """Call ``function(world, *args)`` on new local CPU ranks; return the results by rank."""
    check_place()
    return run_on_local_ranks(num_ranks, function, *args)


def check_place() -> None:
    """Raise a ConfigError if benchmarks cannot start their own CPU ranks."""
    if read_rank_env(os.environ) is not None:
        raise ConfigError("bench starts its own ranks, several times; run it without a launcher")
    if num_local_accelerators():
        raise ConfigError(
            "bench compares engines on CPU ranks, and this machine has GPUs: hide them "
            "(CUDA_VISIBLE_DEVICES='') to measure its CPUs, or measure the GPUs with `python -m "
            "benchmarks.gpu` in a clone of shardwise's repository"
        )


class TimeLeft:
    """Estimates the remaining time from the runs that are done; `str` formats it."""

    def __init__(self, total: float) -> None:
        """``total`` is the number of runs, which take about equally long."""
        self._total = total
        self._done = 0.0
        self._began = time.perf_counter()

    def advance(self, runs: float = 1.0) -> None:
        self._done += runs

    def __str__(self) -> str:
        if not self._done:
            return ""
        left = (time.perf_counter() - self._began) / self._done * (self._total - self._done)
        return f", about {_format_seconds(left)} left in total"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"  # noqa: PLR2004


# -- output --------------------------------------------------------------------------------------


def make_table(
    title: str, columns: Sequence[Column], rows: Mapping[str, Mapping[str, Any]]
) -> Table:
    """Make a table with a line for each row that has any of the figures; others are "-"."""
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row, figures in rows.items():
        cells = [show(figures[name]) if name in figures else "-" for _, name, show in columns]
        if any(name in figures for _, name, _ in columns):
            table.add_row(row, *cells)
    return table


def make_console() -> Console:
    return Console(width=max(WIDTH, Console().width))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` with the command line and a description of the machine."""
    command = shlex.join(["python", *sys.orig_argv[1:]])
    complete = {"command": command, "machine": describe_machine(), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(complete, indent=1) + "\n", encoding="utf-8")


@contextmanager
def show_progress(
    title: str, total: int, *, visible: bool = True
) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: a bar on a terminal, otherwise a line for each named part.

    Yields a function to call when the next of ``total`` parts begins, with its name or "".
    """
    console = Console(stderr=True, quiet=not visible)
    if not console.is_terminal:
        yield lambda name: console.print(f"{title} {name}") if name else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task(title, total=total, completed=-1)

        def begin(name: str) -> None:
            progress.update(task, description=f"{title} {name}".rstrip(), advance=1)

        yield begin
