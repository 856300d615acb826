"""``python -m tests.fuzz --cases 500 --seed 1``: many random cases, until one fails or all hold."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.fuzz.on_device import assert_holds_on_device, start
from tests.fuzz.programs import EVENTS, OF_MATRICES, OPTIMIZERS, SEARCH, SLOW, Case, cases
from tests.fuzz.verdict import DEADLINE_SECONDS, SHOWN, assert_holds
from tests.host.ways import WAYS
from tests.ranks import close_pools
from tests.streams.random_programs import assert_holds_on_streams


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="draws other cases (default: 0)")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_SECONDS, help="seconds for a case (default: 60)"
    )
    parser.add_argument(
        "--first", action="store_true", help="show the first case that fails, not the smallest"
    )
    parser.add_argument(
        "--streams", action="store_true", help="on the simulated device of tests/streams"
    )
    parser.add_argument(
        "--way", choices=WAYS, default=WAYS[0], help="gloo: ranks connect as those of several hosts"
    )
    parser.add_argument(
        "--device", type=torch.device, help="one rank on a real device: cuda, or openreg:1"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=(),
        metavar="WORD",
        help="with --device, leave out cases with such a word: what the device cannot compute",
    )
    parser.add_argument(
        "--events",
        nargs="*",
        choices=EVENTS,
        metavar="KIND",
        help="only programs with micro-batches, and these events between them (default: all)",
    )
    options = parser.parse_args()
    judge: Callable[[Case], Sequence[str] | None] = partial(
        assert_holds, deadline=options.deadline, way=options.way
    )
    if options.streams:
        judge = partial(assert_holds_on_streams, deadline=options.deadline)
    if options.device is not None:
        start()
        judge = partial(assert_holds_on_device, device=options.device, without=options.without)
    try:
        is_alone = options.device is not None  # so nothing is exchanged
        optimizers = OPTIMIZERS if is_alone else (*OPTIMIZERS, *OF_MATRICES)
        drawn = cases(optimizers)
        if options.events is not None:
            drawn = cases(optimizers, kinds=tuple(options.events) or EVENTS)
        elif not (is_alone or options.streams):
            drawn |= cases(optimizers, SLOW) | cases(optimizers, kinds=EVENTS)
        return fuzz(options.cases, options.seed, judge, drawn, shrink=not options.first)
    finally:
        close_pools()


def fuzz(
    num_cases: int,
    seed_value: int,
    judge: Callable[[Case], Sequence[str] | None],
    drawn: SearchStrategy[Case],
    *,
    shrink: bool,
) -> int:
    """Returns 1 after the smallest failing case has been shown."""
    progress = Progress(num_cases)

    @seed(seed_value)
    @settings(
        SEARCH,
        max_examples=num_cases,
        report_multiple_bugs=False,
        phases=SEARCH.phases if shrink else [Phase.generate],
    )
    @given(drawn)
    def holds(case: Case) -> None:
        progress.last = case
        try:
            refused = judge(case) or ()
        except BaseException:
            progress.count(failed=True)
            raise
        progress.count(failed=False)
        progress.refused.update(refused)

    which = "smallest" if shrink else "first"
    try:
        holds()
    except AssertionError as error:
        progress.write(f"\n{error}\n\nThe {which} case that fails so (seed {seed_value}):\n")
        progress.write(f"{progress.last!r}\n")
        return 1
    progress.write("\nnothing found\n")
    for event, number in progress.refused.most_common(SHOWN):
        progress.write(f"refused {number} times: {event}\n")
    return 0


class Progress:
    """One line that is written over and over."""

    def __init__(self, num_cases: int) -> None:
        self._num_cases = num_cases
        self._num_run = 0
        self._num_failed = 0
        self._started = time.monotonic()
        self.last: Case | None = None
        self.refused: Counter[str] = Counter()  # events, with the engine's error

    def count(self, *, failed: bool) -> None:
        self._num_run += 1
        self._num_failed += failed
        seconds = time.monotonic() - self._started
        shrinking = f", {self._num_failed} failed: looking for the smallest" * (
            self._num_failed > 0
        )
        self.write(f"\r{self._num_run}/{self._num_cases} cases, {seconds:.0f} s{shrinking}")

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
