"""Pools of Gloo ranks that tests share.

The body of a test under ``on_ranks`` runs on every rank, once per world size::

    @on_ranks(2, 4)
    @pytest.mark.parametrize("scale", [1, 10])
    def test_sum(scale: int) -> None:
        total = torch.tensor(scale)
        dist.all_reduce(total)
        assert total == scale * dist.get_world_size()

``run_on`` does the same for any function of a module, and returns what each rank returned::

    def test_ranks() -> None:
        assert run_on(2, dist.get_rank) == [0, 1]

The first test that needs W ranks starts a pool of W processes, which serves all later ones, so
that a multi-rank test costs milliseconds. A rank that dies, hangs or raises fails its own test at
once, with its traceback and output. It never fails the next test: a pool in doubt is killed.
"""

import atexit
import functools
import inspect
import pickle
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import psutil
import pytest

from tests.rank_handle import POLL_SECONDS, RankProcess

T = TypeVar("T")
P = ParamSpec("P")

WORLD_SIZE = "world_size"
DEADLINE_SECONDS = 120.0
START_SECONDS = 120.0  # importing torch in four processes on a busy machine
# How long the other ranks may take once one has raised: they are often in a collective with it.
GRACE_SECONDS = 10.0
# New groups take 70 ms on four ranks, so not every call gets them; but each group that a test
# makes keeps threads until its default group goes. A thread of Gloo wakes up 100 times a second:
# 300 of them take a tenth of a core from all tests that follow. A new rank has about 10 threads.
MAX_THREADS = 32


class RankFailed(AssertionError):  # noqa: N818 (it is a test that failed)
    """At least one rank raised, died or did not answer.

    ``errors`` says what, by rank, with what the rank printed; ``headlines`` says it in a line each.
    """

    def __init__(self, message: str, outcome: "Outcome") -> None:
        super().__init__(message)
        self.errors = outcome.errors
        self.headlines = outcome.headlines


def on_ranks(
    *world_sizes: int, thorough: Collection[int] = (), deadline: float = DEADLINE_SECONDS
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run a test's body on every rank of a pool, once for each of ``world_sizes``.

    The arguments (parameters and values of fixtures) must be picklable; a test that wants its world
    size takes the argument ``world_size``. World sizes in ``thorough`` are left to
    `make thorough`. With none in either, the test is parametrized with ``world_size`` by itself.
    ``deadline`` is as in ``run_on``.
    """

    more = [pytest.param(size, marks=pytest.mark.thorough) for size in thorough]
    sizes = [*world_sizes, *more]

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(body)
        has_argument = WORLD_SIZE in signature.parameters

        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            arguments = dict(signature.bind_partial(*args).arguments) | kwargs
            world_size = arguments[WORLD_SIZE] if has_argument else arguments.pop(WORLD_SIZE)
            run_on(cast("int", world_size), TestBody(test, arguments), deadline=deadline)

        if not has_argument:
            extra = inspect.Parameter(WORLD_SIZE, inspect.Parameter.KEYWORD_ONLY)
            parameters = [*signature.parameters.values(), extra]
            setattr(test, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        return pytest.mark.parametrize(WORLD_SIZE, sizes)(test) if sizes else test

    return decorate


def run_on(
    world_size: int, function: Callable[..., T], *args: object, deadline: float = DEADLINE_SECONDS
) -> list[T]:
    """Call ``function(*args)`` on every rank of a pool and return the results by rank.

    ``function`` is a module-level function. In each rank torch.distributed is initialised (Gloo),
    torch has one thread, and its seed is 0. Arguments and results are pickled. Raises
    ``RankFailed`` when a rank raises, dies, or does not answer within ``deadline`` seconds.
    """
    __tracebackhide__ = True
    request = pickle.dumps((function, args))
    pool = ready_pool(world_size)
    try:
        outcome = pool.run(request, deadline)
    except BaseException:  # an interrupt or a test's own timeout: the ranks are still at it
        pool.kill()
        raise
    if outcome.errors:
        raise RankFailed(outcome.report(), outcome)
    return [cast("T", pickle.loads(outcome.results[rank])) for rank in range(world_size)]


def close_pools() -> None:
    for pool in _pools.values():
        pool.kill()
    _pools.clear()


def pool_processes() -> set[int]:
    """The process ids of all ranks."""
    return {rank.pid for pool in _pools.values() for rank in pool.ranks}


@dataclass(frozen=True)
class TestBody:
    """The body of a test under ``on_ranks`` with its arguments, pickled by the test's name."""

    __test__ = False  # not a class of tests
    test: Callable[..., None]
    arguments: dict[str, object]

    def __call__(self) -> None:
        inspect.unwrap(self.test)(**self.arguments)


@dataclass
class Outcome:
    """The answers to one call, by rank."""

    world_size: int
    results: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    headlines: dict[int, str] = field(default_factory=dict)  # of the errors, the likely cause first

    @property
    def missing(self) -> list[int]:
        answered = self.results.keys() | self.errors.keys()
        return [rank for rank in range(self.world_size) if rank not in answered]

    def fail(self, rank: int, headline: str, error: str) -> None:
        self.headlines[rank] = headline
        self.errors[rank] = error

    def record_death(self, rank: int, headline: str, output: str) -> None:
        """Put it first: other ranks may have raised because of it, and be noticed earlier."""
        self.headlines = {rank: headline} | self.headlines
        self.errors[rank] = headline + output

    def report(self) -> str:
        lines = [f"rank {rank} {headline}" for rank, headline in self.headlines.items()]
        lines += [f"rank {rank} returned" for rank in sorted(self.results)]
        for rank in self.headlines:
            lines += ["", f"----- rank {rank} of {self.world_size} -----", self.errors[rank]]
        return "\n".join(lines)


class Pool:
    """The ranks of one world size."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks = [
            RankProcess(Path(self.folder.name), rank, world_size) for rank in range(world_size)
        ]
        self.alive = True
        self.max_threads = MAX_THREADS  # of a rank, before it gets new groups

    def start(self) -> None:
        """Wait until every rank is ready, and say why when one is not."""
        try:
            self.pass_on_port()
            outcome = self.collect(START_SECONDS)
        except BaseException:
            self.kill()
            raise
        if outcome.errors:
            self.kill()
            raise RankFailed("the ranks did not start\n" + outcome.report(), outcome)

    def pass_on_port(self) -> None:
        """Hand the port of rank 0's store to the others."""
        if not self.ranks[0].socket.poll(START_SECONDS):
            return
        try:
            port = self.ranks[0].socket.recv()
        except EOFError:
            return  # it died, as ``collect`` is about to find out
        for rank in self.ranks[1:]:
            rank.send(pickle.dumps(port))

    def run(self, request: bytes, deadline: float) -> Outcome:
        for rank in self.ranks:
            rank.send(request)
        outcome = self.collect(deadline)
        if self.is_alive() and (outcome.errors or self.num_threads() > self.max_threads):
            self.renew_groups()
        return outcome

    def num_threads(self) -> int:
        """The number of threads of the rank that has most; 0 if one has ended meanwhile."""
        try:
            return max(int(psutil.Process(rank.pid).num_threads()) for rank in self.ranks)
        except psutil.NoSuchProcess:
            return 0

    def renew_groups(self) -> None:
        """Give the next call new groups; ranks that cannot agree even on that are killed."""
        for rank in self.ranks:
            rank.send(b"")
        if self.collect(GRACE_SECONDS).errors:
            self.kill()
        # More if some groups remain: without new threads, newer groups would not help.
        self.max_threads = max(MAX_THREADS, self.num_threads() + MAX_THREADS // 2)

    def collect(self, deadline: float) -> Outcome:
        """Wait for every rank's answer. The pool is dead afterwards if one gave none."""
        outcome = Outcome(len(self.ranks))
        patience = f"{deadline:g} s of the call"
        end = time.monotonic() + deadline
        in_grace = False
        while outcome.missing and time.monotonic() < end:
            self.collect_answers(outcome)
            if outcome.errors and not in_grace:
                in_grace = True
                patience = f"{GRACE_SECONDS:g} s of the first failure"
                end = min(end, time.monotonic() + GRACE_SECONDS)
        self.give_up_on_missing(outcome, patience)
        return outcome

    def collect_answers(self, outcome: Outcome) -> None:
        ready = wait([self.ranks[number].socket for number in outcome.missing], POLL_SECONDS)
        for number in outcome.missing:
            rank = self.ranks[number]
            if rank.socket in ready or rank.has_died():
                record_answer(outcome, number, rank)

    def give_up_on_missing(self, outcome: Outcome, patience: str) -> None:
        missing = outcome.missing
        for number in missing:
            headline = f"gave no answer within {patience}"
            stacks = f"{headline}; its stacks:\n{self.ranks[number].read_stacks()}"
            outcome.fail(number, headline, stacks + self.ranks[number].read_output())
        if missing or not self.is_alive():
            self.kill()

    def is_alive(self) -> bool:
        return self.alive and all(rank.process.is_alive() for rank in self.ranks)

    def kill(self) -> None:
        self.alive = False
        for rank in self.ranks:
            rank.kill()
        self.folder.cleanup()


def record_answer(outcome: Outcome, number: int, rank: RankProcess) -> None:
    match rank.receive():
        case None:
            outcome.record_death(number, rank.describe_death(), rank.read_output())
        case True, result:
            outcome.results[number] = result
        case _, text:
            trace = text.decode().rstrip()
            headline = "raised " + _line_of_type(trace)
            outcome.fail(number, headline, trace + rank.read_output())


_pools: dict[int, Pool] = {}
atexit.register(close_pools)


def ready_pool(world_size: int) -> Pool:
    pool = _pools.get(world_size)
    if pool is None or not pool.is_alive():
        if pool is not None:
            pool.kill()
        pool = _pools[world_size] = Pool(world_size)
        pool.start()
    return pool


def _line_of_type(trace: str) -> str:
    """The line with the exception's type: the first one after the last frame."""
    lines = trace.splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), lines[-1])
