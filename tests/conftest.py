"""What every test gets: ranks that end with the session, and a check that it leaves nothing."""

from collections.abc import Iterator

import pytest

from tests.leaks import fail_on_leaks
from tests.ranks import close_pools

# The helpers of tests assert as well; named before any of them is imported by a test.
pytest.register_assert_rewrite("tests")


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with fail_on_leaks():
        yield
