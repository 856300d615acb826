"""The engine stays readable: how much of it a plain training step runs."""

from pathlib import Path

from tests import reading
from tests.forked import run_forked
from tests.versions import needs_own_operators

# In tests/reading.py's step: what somebody reads to follow it. Raise them only with a reason.
# The last one: each call of a unit looks for tensors through which backward may enter it later, and
# for views of parameters, which are freed; it carries attributes of parameters both ways. And ranks
# agree on which parameters a held gradient may belong to, so that freezing one loses nothing. And a
# thread cleans up failed backwards, process groups are created on all ranks or on none, and streams
# of the program are joined. Events are timed only if somebody measures, and queues may be shared.
# A model may sleep, and a reduction may continue over replicas outside of the mesh. A step may have
# leaves, whose gradients are summed in a tree, gradients may be elsewhere than parameters, and an
# optimizer may step on the device what is in host memory. What the core does not use of the devices
# of a machine is in a file of its own. A call copies its inputs to the device. Gradients in a
# buffer are found by position, so that no time of a step is quadratic in their number. Each call of
# a unit has autocast forget the casts of others. What torch.compile returned has bound the call of
# a module's former class. What the call for a block has ignored, the call for the model ignores,
# and programs find the user's class behind that of units. A unit that is called outside of its
# model's forward finds the units that hold its shared weights, which stay on their ranks.
MAX_LINES = 2_480
MAX_FILES = 60
MAX_FRAMES, MAX_FRAME_FILES = 9, 5
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"


@needs_own_operators  # what replaces them in torch 2.11 is more lines
def test_a_plain_step_runs_few_lines() -> None:
    found = run_forked(reading.lines_of_a_step)
    assert {"runtime/scheduler.py", "schedule/sequencer.py"} <= found.keys()
    assert sum(found.values()) <= MAX_LINES, found
    assert len(found) <= MAX_FILES, found


def test_a_gather_is_few_calls_from_the_call_of_its_unit() -> None:
    stack = run_forked(reading.stack_of_a_gather)
    assert len(stack) <= MAX_FRAMES
    assert len({file for file, _ in stack}) <= MAX_FRAME_FILES
    shown = "\n".join(f"   {file:<28} {function}" for file, function in stack)
    assert shown in DESIGN.read_text(encoding="utf-8")
