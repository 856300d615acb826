"""Replicas are killed at random moments; `python -m tests.replicas.soak` kills them more often."""

import pytest

from tests.replicas.soak import run


@pytest.mark.thorough
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_kills_at_random_moments(num_replicas: int) -> None:
    assert run(2 * num_replicas, num_replicas, seed=5).checkpoints
