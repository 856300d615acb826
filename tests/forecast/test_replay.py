from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from shardwise.forecast.time.replay import Costs, Part, Program, replay, schedule
from shardwise.plan.plan import Plan, make_plan
from shardwise.schedule.events import Event, EventKind

BLOCKS = 3
COMPUTE, GATHER, REDUCE = 10.0, 4.0, 3.0


def plan_of(prefetch: int = 1) -> Plan:
    blocks = [nn.Linear(4, 4) for _ in range(BLOCKS)]
    return make_plan(nn.Sequential(*blocks), world_size=2, units=nn.Linear, prefetch=prefetch)


def program_of(plan: Plan, seconds: float = COMPUTE, num_passes: int = 1) -> Program:
    """Return compute of ``seconds`` for every block, in forward and in backward."""
    computes = (EventKind.FORWARD, EventKind.BACKWARD)
    parts = tuple(
        Part(event.kind, event.unit, seconds if event.unit else 0.0)
        for event in schedule(plan)
        if event.kind in computes
    )
    return Program((parts,) * num_passes)


def transfer(kind: EventKind, unit: int) -> float:
    if not unit:
        return 0.0  # the root has no parameters
    return REDUCE if kind is EventKind.REDUCE else GATHER


def run(
    plan: Plan, programs: Sequence[Program], *, holds_gradients: bool = False
) -> tuple[float, float]:
    """Return the seconds of the update, and the seconds that the first rank waits."""
    found = replay(
        plan.units,
        programs,
        Costs(transfer),
        prefetch=plan.prefetch,
        holds_gradients=holds_gradients,
    )
    return found.seconds, found.exposed_seconds[0]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "ddp"])
def test_a_replay_has_the_events_of_the_schedule(strategy: str, prefetch: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(BLOCKS)), nn.LayerNorm(4))
    plan = make_plan(model, world_size=2, units=nn.Linear, strategy=strategy, prefetch=prefetch)
    found = replay(plan.units, [program_of(plan)] * 2, Costs(transfer), prefetch=prefetch)
    for events in found.events:
        assert [Event(one.event, one.unit, one.bytes) for one in events] == schedule(plan)


def test_without_prefetch_every_gather_is_exposed() -> None:
    plan = plan_of(prefetch=0)
    seconds, exposed = run(plan, [program_of(plan)] * 2)
    gathers = BLOCKS * GATHER + (BLOCKS - 1) * GATHER  # the last block is kept for backward
    assert exposed == gathers + REDUCE  # and so is the last reduction
    assert seconds == 2 * BLOCKS * COMPUTE + exposed


def test_prefetch_hides_all_gathers_but_the_first() -> None:
    plan = plan_of(prefetch=1)
    seconds, exposed = run(plan, [program_of(plan)] * 2)
    assert exposed == GATHER + REDUCE
    assert seconds == 2 * BLOCKS * COMPUTE + exposed


def test_all_ranks_wait_for_the_slowest_one() -> None:
    plan = plan_of()
    programs = [program_of(plan), program_of(plan, seconds=COMPUTE + 2.0)]
    seconds, exposed = run(plan, programs)
    slow, _ = run(plan, [programs[1]] * 2)
    assert seconds == slow
    assert exposed == pytest.approx(GATHER + REDUCE + 2 * BLOCKS * 2.0)


def test_held_gradients_are_reduced_once() -> None:
    plan = plan_of()
    programs = [program_of(plan, seconds=0.0, num_passes=4)]
    held, _ = run(plan, programs, holds_gradients=True)
    seconds, _ = run(plan, programs)
    assert held < seconds
    found = replay(plan.units, programs, Costs(transfer), prefetch=1, holds_gradients=True)
    reduces = [one for one in found.events[0] if one.event is EventKind.REDUCE]
    assert {one.step for one in reduces} == {3}
    assert len(reduces) == BLOCKS


def test_compute_is_slower_while_a_collective_runs() -> None:
    plan = plan_of()
    plain = Costs(transfer)
    alone = replay(plan.units, [program_of(plan)], plain, prefetch=1)
    slowed = replay(
        plan.units,
        [program_of(plan)],
        replace(plain, interference=0.5),
        prefetch=1,
    )
    # Two gathers in forward, two in backward and all reductions but the last are hidden. Compute
    # loses a third of each second of these.
    hidden = 2 * GATHER + 2 * GATHER + 2 * REDUCE
    overlapping = REDUCE  # a reduction and a gather begin together
    assert slowed.seconds - alone.seconds == pytest.approx((hidden - overlapping) / 3)


def test_gathers_and_reductions_take_turns_on_one_link() -> None:
    plan = plan_of()
    short = program_of(plan, seconds=GATHER)
    both = replay(plan.units, [short], Costs(transfer), prefetch=1)
    turns = replay(plan.units, [short], Costs(transfer, has_one_link=True), prefetch=1)
    assert turns.seconds == both.seconds + REDUCE
