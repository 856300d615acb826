"""Random programs of the fuzzer on the simulated device."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils._python_dispatch import _disable_current_modes

from shardwise.watch.monitor import Patience
from tests.fuzz.compare import Comparison, Report, prepared, warm_up
from tests.fuzz.programs import Case
from tests.fuzz.verdict import DEADLINE_SECONDS
from tests.ranks import START_SECONDS, run_on
from tests.streams.checker import differences_in_order
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Collective, Simulation

__all__ = ["assert_holds_on_streams"]

SHOWN = 6  # problems
PATIENCE = Patience(poll_seconds=0.05, beat_seconds=0.1)


@dataclass(frozen=True)
class Checked:
    """The results of one rank."""

    report: Report
    found: tuple[str, ...]
    collectives: tuple[Collective, ...]


def assert_holds_on_streams(case: Case, deadline: float = DEADLINE_SECONDS) -> None:
    """Check that ``case`` on late streams gives the numbers of one process, without problems.

    Raises:
        AssertionError: the numbers differ, there is a problem, or a rank raises or hangs.
    """
    ranks = case.sharding.ranks
    run_on(ranks, warm_up, deadline=START_SECONDS)
    checked = run_on(ranks, check, case, deadline=deadline)
    problems = [
        f"rank {rank}: {problem}"
        for rank, one in enumerate(checked)
        for problem in (*one.report.problems[:SHOWN], *one.found[:SHOWN])
    ]
    if not any(step.fault for step in case.steps):
        launched = {rank: one.collectives for rank, one in enumerate(checked)}
        problems += differences_in_order(launched)
    assert not problems, "\n".join(problems)


def check(case: Case) -> Checked:
    """Train ``case`` on this rank's simulated device."""
    simulation = Simulation(is_late=True)
    simulation.current_device = DEVICE.index
    try:
        with prepared(case), simulated(simulation, patience=PATIENCE):
            comparison = OnDevice(case, simulation)
            report = comparison.run()
            del comparison
    except Exception as error:
        for one in simulation.found[:SHOWN]:
            error.add_note(str(one))
        raise
    found = [str(one) for one in simulation.found]
    return Checked(report, tuple(found), tuple(simulation.collectives))


class OnDevice(Comparison):
    """A model on the simulated device, and its reference on the host."""

    loses_results = True

    def __init__(self, case: Case, simulation: Simulation) -> None:
        self.simulation = simulation
        super().__init__(case, DEVICE)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        with _disable_current_modes():
            yield
