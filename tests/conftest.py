"""Fixtures of every test: ranks that end with the session, and a check for what is left running."""

from collections.abc import Iterator

import hypothesis
import pytest

from tests.leaks import fail_on_leaks
from tests.ranks import close_pools

# The helpers of tests assert as well; named before any of them is imported by a test.
pytest.register_assert_rewrite("tests")

# A busy machine makes any example slow, which says nothing about the code.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with fail_on_leaks():
        yield
