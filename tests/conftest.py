"""Fixtures of every test: ranks that end with the session, and a check for what is left running."""

import os
import zlib
from collections.abc import Iterator

import hypothesis
import pytest

from tests.leaks import fail_on_leaks
from tests.ranks import close_pools

# The helpers of tests assert as well; named before any of them is imported by a test.
pytest.register_assert_rewrite("tests")

# Before torch is imported. Tests run in two processes: threads of one that wait would spin on the
# cores that the other one needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Both ends of a connection to a TCPStore ask a name server for the other's name. If it drops a
# question, as some do of many in a second, all ranks would wait for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# A busy machine makes any example slow, which says nothing about the code.
for profile, num_examples in (("tests", 30), ("thorough", 300)):
    hypothesis.settings.register_profile(
        profile,
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K/N",
        type=_read_part,
        help="of the thorough tests run only part K of N, K from 0 to N-1 (by a hash of their ids)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: tuple[int, int] | None = config.getoption("part")
    if part is None:
        return
    number, parts = part
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_outside = zlib.crc32(item.nodeid.encode()) % parts != number
        is_left_out = is_outside and item.get_closest_marker("thorough") is not None
        (left_out if is_left_out else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def _read_part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise pytest.UsageError(f"--part {text}: expected K/N with K from 0 to N-1, as in 3/20")
    return int(number), int(parts)
