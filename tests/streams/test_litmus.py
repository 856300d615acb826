"""The checker finds exactly the problems of small programs."""

import pytest

from tests.streams.install import simulated
from tests.streams.litmus import LITMUS
from tests.streams.simulation import Simulation


@pytest.mark.parametrize("name", LITMUS)
def test_the_verdict_on_a_small_program_is_right(name: str) -> None:
    litmus = LITMUS[name]
    simulation = Simulation()
    with simulated(simulation):
        litmus.run(simulation)
    problems = {found.problem for found in simulation.found}
    assert problems == set(litmus.expected), [str(found) for found in simulation.found]
