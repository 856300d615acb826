"""Random models and programs train as in one process; ``python -m tests.fuzz`` tries many more."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.programs import Case, cases
from tests.fuzz.verdict import assert_holds

SEARCH = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@given(cases())
@settings(SEARCH, max_examples=8)
def test_random_programs_equal_one_process(case: Case) -> None:
    assert_holds(case)


@pytest.mark.thorough
@given(cases())
@settings(SEARCH, max_examples=40)
def test_more_random_programs_equal_one_process(case: Case) -> None:
    assert_holds(case)
