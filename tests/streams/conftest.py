"""The simulated device sees operators, and not the memory that ``resize_`` gives to a storage."""

from pathlib import Path

import pytest

from tests.versions import needs_swap

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(needs_swap)
