"""Whether a case holds: all of its ranks agree with one process, and replicas with each other."""

from tests.fuzz.compare import check, warm_up
from tests.fuzz.programs import Case
from tests.ranks import START_SECONDS, run_on

__all__ = ["DEADLINE_SECONDS", "assert_holds"]

DEADLINE_SECONDS = 120.0
SHOWN = 6  # problems; one cause makes many


def assert_holds(
    case: Case,
    deadline: float = DEADLINE_SECONDS,
    mutant: str | None = None,
    way: str = "memory",
) -> tuple[str, ...]:
    """Run ``case`` on the ranks that it wants, for at most ``deadline`` seconds.

    With a ``mutant``, the engine has that fault. Ranks are connected in one of `WAYS`.

    Returns:
        The events that the engine refused.

    Raises:
        AssertionError: it differs from one process, raises, or does not end.
    """
    run_on(case.sharding.ranks, warm_up, deadline=START_SECONDS)
    reports = run_on(case.sharding.ranks, check, case, mutant, way, deadline=deadline)
    for rank, report in enumerate(reports):
        problems = "\n".join(report.problems[:SHOWN])
        assert not report.problems, f"rank {rank} differs from one process:\n{problems}"
    bits = {(report.shard, report.digest) for report in reports}
    assert len(bits) == len({report.shard for report in reports}), "replicas differ"
    return reports[0].refused
