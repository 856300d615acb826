"""Random models and programs train as in one process; ``python -m tests.fuzz`` tries many more."""

from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.programs import Case, cases
from tests.fuzz.verdict import assert_holds


@given(cases())
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
def test_random_programs_equal_one_process(case: Case) -> None:
    assert_holds(case)
