"""The engine stays readable: how much of it a plain training step runs."""

from tests import reading
from tests.forked import run_forked

# In tests/reading.py's step: what somebody reads to follow it. Raise them only with a reason.
# The last one: each call of a unit looks for tensors through which backward may enter it later, and
# for views of parameters, which are freed; it carries attributes of parameters both ways.
MAX_LINES = 2_520
MAX_FILES = 61


def test_a_plain_step_runs_few_lines() -> None:
    found = run_forked(reading.lines_of_a_step)
    assert {"runtime/scheduler.py", "schedule/sequencer.py"} <= found.keys()
    assert sum(found.values()) <= MAX_LINES, found
    assert len(found) <= MAX_FILES, found
