"""The engine stays readable: how much of it a plain training step runs."""

from tests import reading
from tests.forked import run_forked
from tests.versions import needs_own_operators

# In tests/reading.py's step: what somebody reads to follow it. Raise them only with a reason.
# The last one: each call of a unit looks for tensors through which backward may enter it later, and
# for views of parameters, which are freed; it carries attributes of parameters both ways. And ranks
# agree on which parameters a held gradient may belong to, so that freezing one loses nothing. And a
# thread cleans up failed backwards, process groups are created on all ranks or on none, and streams
# of the program are joined. Events are timed only if somebody measures, and queues may be shared.
MAX_LINES = 2_509
MAX_FILES = 61


@needs_own_operators  # what replaces them in torch 2.11 is more lines
def test_a_plain_step_runs_few_lines() -> None:
    found = run_forked(reading.lines_of_a_step)
    assert {"runtime/scheduler.py", "schedule/sequencer.py"} <= found.keys()
    assert sum(found.values()) <= MAX_LINES, found
    assert len(found) <= MAX_FILES, found
