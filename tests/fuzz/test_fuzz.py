"""Random models and programs train as in one process; ``python -m tests.fuzz`` tries many more."""

import pytest
from hypothesis import given, settings

from tests.fuzz.programs import SEARCH, Case, cases
from tests.fuzz.verdict import assert_holds


@given(cases())
@settings(SEARCH, derandomize=True, max_examples=8)
def test_random_programs_equal_one_process(case: Case) -> None:
    assert_holds(case)


@pytest.mark.thorough
@given(cases())
@settings(SEARCH, derandomize=True, max_examples=40)
def test_more_random_programs_equal_one_process(case: Case) -> None:
    assert_holds(case)
