"""The schedule: written out for a small model, and checked for random programs."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from torch import nn

from shardwise.forecast.time.replay import schedule
from shardwise.plan.options import UnitSettings
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.strategy import PRESETS
from shardwise.schedule.events import EventKind, describe
from shardwise.schedule.sequencer import Outcome, Sequencer
from tests.schedule.programs import (
    DIFFERENTIABLE_OR_NOT,
    Backward,
    CallSpec,
    Driver,
    Forward,
    Monitor,
    Program,
    Recompute,
    call_specs,
    make_units,
    plans,
    programs,
)

# -- a step written out ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.blocks = nn.Sequential(Block(), Block())


WRITTEN_OUT = {
    0: """
        gather Root, wait Root, forward Root
        gather 0, wait 0, forward 0
        free 0, gather 1, wait 1, forward 1
        backward Root
        backward 1
        free 1, reduce 1, gather 0, wait 0, backward 0
        free 0, reduce 0, free Root, finish 1, finish 0, reduce Root, finish Root
    """,
    1: """
        gather Root, gather 0, wait Root, forward Root
        gather 1, wait 0, forward 0
        free 0, wait 1, forward 1
        backward Root
        gather 0, backward 1
        free 1, reduce 1, wait 0, backward 0
        free 0, reduce 0, free Root, finish 1, finish 0, reduce Root, finish Root
    """,
    2: """
        gather Root, gather 0, gather 1, wait Root, forward Root
        wait 0, forward 0
        free 0, wait 1, forward 1
        gather 0, backward Root
        backward 1
        free 1, reduce 1, wait 0, backward 0
        free 0, reduce 0, free Root, finish 1, finish 0, reduce Root, finish Root
    """,
}


def words(events: str) -> list[str]:
    words = re.split(r"[,\n]", events.replace("finish ", "finish_reduce "))
    return [word.strip() for word in words if word.strip()]


def described(plan: Plan) -> list[str]:
    labels = [unit.label for unit in plan.units]
    return [describe(event, labels) for event in schedule(plan)]


@pytest.mark.parametrize("prefetch", WRITTEN_OUT)
def test_the_example_written_out(prefetch: int) -> None:
    plan = make_plan(Root(), world_size=2, units=Block, prefetch=prefetch)
    events = [name.replace("blocks.", "") for name in described(plan)]
    assert events == words(WRITTEN_OUT[prefetch])


def test_bytes_of_the_example() -> None:
    """12 elements of 4 bytes a unit; a rank keeps 2 x 32 bytes of them after padding."""
    plan = make_plan(Root(), world_size=2, units=Block)
    moved = {(event.kind, event.bytes) for event in schedule(plan)}
    assert moved == {
        (EventKind.GATHER, 128),
        (EventKind.FREE, 128),
        (EventKind.REDUCE, 128),
        (EventKind.FINISH_REDUCE, 64),
        (EventKind.WAIT, 0),
        (EventKind.FORWARD, 0),
        (EventKind.BACKWARD, 0),
    }


def test_a_frozen_model_has_no_backward() -> None:
    model = Root().requires_grad_(False)
    kinds = {event.kind for event in schedule(make_plan(model, world_size=2, units=Block))}
    assert kinds == {EventKind.GATHER, EventKind.WAIT, EventKind.FORWARD, EventKind.FREE}


def test_a_frozen_front_has_no_backward() -> None:
    model = Root()
    model.fc.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    events = schedule(make_plan(model, world_size=2, units=Block))
    assert [e.unit for e in events if e.kind is EventKind.BACKWARD] == [0, 2]
    assert [e.unit for e in events if e.kind is EventKind.REDUCE] == [2]


@given(plans())
def test_schedules_are_lawful(plan: Plan) -> None:
    monitor = Monitor(plan)
    monitor.perform(schedule(plan), busy=())
    assert not monitor.gathered
    assert not monitor.reducing


# -- single cases ------------------------------------------------------------------------------


def flat_plan(num_blocks: int, *, prefetch: int = 1) -> Plan:
    """A root that keeps its parameters and blocks that do not."""
    count = num_blocks + 1
    parents = [None, *(0 for _ in range(num_blocks))]
    reshard = [False, *(True for _ in range(num_blocks))]
    return Plan(make_units(parents, ["trainable"] * count, reshard), PRESETS["fsdp"], 2, prefetch)


def moves(driver: Driver, start: int = 0) -> list[str]:
    compute = (EventKind.FORWARD, EventKind.BACKWARD, EventKind.WAIT)
    events = [e for e in driver.monitor.events[start:] if e.kind not in compute]
    return [describe(event, driver.monitor.labels) for event in events]


def test_a_new_order_gathers_nothing_ahead() -> None:
    """Units that were gathered ahead and not used are freed immediately."""
    driver = Driver(flat_plan(3))
    driver.run((Forward(CallSpec(0, inner=(CallSpec(1), CallSpec(2)))), Backward()))
    start = len(driver.monitor.events)
    driver.run((Forward(CallSpec(0, inner=(CallSpec(3), CallSpec(2)))),))
    assert moves(driver, start) == words(
        "gather u0, gather u1, free u1, gather u3, free u3, gather u2"
    )


def test_a_shorter_pass_frees_prefetched_units() -> None:
    driver = Driver(flat_plan(2))
    driver.run((Forward(CallSpec(0, inner=(CallSpec(1), CallSpec(2)))), Backward()))
    start = len(driver.monitor.events)
    driver.run((Forward(CallSpec(0, inner=(CallSpec(1),))),))
    assert moves(driver, start) == words("gather u0, gather u1, gather u2, free u2")


def test_an_older_pass_may_be_walked_first() -> None:
    """The last unit of forward stays for its backward, but another backward comes first."""
    driver = Driver(flat_plan(2))
    driver.run((Forward(CallSpec(1)), Forward(CallSpec(2))))
    start = len(driver.monitor.events)
    driver.run((Backward((1,)),))
    assert moves(driver, start) == words("free u2, gather u1, free u1, reduce u1, finish u1")


def test_recomputing_several_units_keeps_the_one_that_is_next() -> None:
    """u2 is gathered ahead for its own backward; u1 is gathered for the recomputation alone."""
    driver = Driver(flat_plan(3))
    driver.run((Forward(CallSpec(0, inner=(CallSpec(1), CallSpec(2), CallSpec(3)))),))
    start = len(driver.monitor.events)
    region = Recompute(reentrant=False, region="siblings", stop_after=None)
    driver.run((Backward(recomputes=(None, region)),))
    assert moves(driver, start)[:7] == words(
        "gather u2, gather u1, free u1, free u3, reduce u3, gather u1, free u2"
    )


def test_one_unit_called_twice_is_reduced_once() -> None:
    driver = Driver(flat_plan(1))
    driver.run((Forward(CallSpec(0, inner=(CallSpec(1), CallSpec(1)))), Backward()))
    assert moves(driver) == words(
        "gather u0, gather u1, free u1, reduce u1, free u0, finish u1, reduce u0, finish u0"
    )


def test_two_passes_in_one_graph_task() -> None:
    """The younger pass and its reductions finish before its units are visited again."""
    driver = Driver(flat_plan(1))
    call = CallSpec(0, inner=(CallSpec(1),))
    driver.run((Forward(call), Forward(call)))
    start = len(driver.monitor.events)
    driver.run((Backward((0, 1)),))
    assert moves(driver, start) == words(
        """reduce u1, finish u1, reduce u0, finish u0,
        free u1, reduce u1, free u0, finish u1, reduce u0, finish u0"""
    )


def test_a_pass_ends_the_same_way_wherever_backward_leaves_it() -> None:
    """The younger pass of a graph task ends when the older one begins, reached or not.

    u1 is freed by the younger pass's last call, u2, and gathered again for the older pass, also on
    the rank where no gradient reaches u2.
    """
    programs = [
        (
            Forward(CallSpec(0, Outcome.DETACHED, inner=(CallSpec(1),))),
            Forward(CallSpec(0, inner=(CallSpec(2), CallSpec(1)))),
            Backward((0, 1), missing),
        )
        for missing in (0b000, 0b100)
    ]
    one, other = Driver(flat_plan(2, prefetch=0)), Driver(flat_plan(2, prefetch=0))
    one.run(programs[0])
    other.run(programs[1])
    assert moves(one) == moves(other)


def test_a_hidden_result_keeps_its_unit_gathered() -> None:
    """No hook reports when its backward begins, so its parameters must stay gathered."""
    driver = Driver(flat_plan(2))
    inner = (CallSpec(1, Outcome.UNHOOKED), CallSpec(2))
    driver.run((Forward(CallSpec(0, inner=inner)),))
    assert driver.monitor.gathered == {"u0", "u1", "u2"}


def test_a_nested_backward_leaves_room_for_the_outer_one() -> None:
    """At most one reduction is outstanding when the outer backward goes on."""
    driver = Driver(flat_plan(3))
    inner = (CallSpec(1, Outcome.DETACHED), CallSpec(2, Outcome.DETACHED), CallSpec(3))
    reentrant = Recompute(reentrant=True, region="siblings", stop_after=None)
    driver.run((Forward(CallSpec(0, inner=inner)), Backward(recomputes=(None, reentrant))))
    reduced = [e.unit for e in driver.monitor.events if e.kind is EventKind.REDUCE]
    assert reduced == [2, 1, 3, 0]


def test_a_sequencer_knows_what_is_in_use() -> None:
    sequencer = Sequencer(flat_plan(1))
    root, _ = sequencer.enter(0, grad=True)
    block, _ = sequencer.enter(1, grad=True)
    sequencer.exit(block, Outcome.DIFFERENTIABLE)
    assert [sequencer.is_in_use(unit) for unit in (0, 1)] == [True, False]
    sequencer.exit(root, Outcome.DIFFERENTIABLE)
    sequencer.before_backward(block, task=0)
    assert [sequencer.is_in_use(unit) for unit in (0, 1)] == [True, True]
    sequencer.finish_backward(task=0)
    assert [sequencer.is_in_use(unit) for unit in (0, 1)] == [False, False]


@pytest.mark.parametrize("steps_in_backward", [False, True])
def test_a_unit_that_has_stepped_keeps_no_shard_in_its_subgroup(steps_in_backward: bool) -> None:
    """It would have the values before the step. u0 accumulates, and u1 does not."""
    plan = flat_plan(1)
    options = plan.units[1].options.over(PRESETS["hfsdp"], world_size=4, replicas=2)
    plan = replace(plan, units=tuple(replace(unit, options=options) for unit in plan.units))
    settings = [UnitSettings(reduce_grads=False), UnitSettings()]
    sequencer = Sequencer(plan, settings)
    sequencer.steps_in_backward = steps_in_backward
    for _ in range(2):  # in the second backward, no step of u0 has come between
        root, events = sequencer.enter(0, grad=True)
        block, entering = sequencer.enter(1, grad=True)
        events += entering
        for call in (block, root):
            events += sequencer.exit(call, Outcome.DIFFERENTIABLE)
        for call in (root, block):
            events += sequencer.before_backward(call, task=0)
        events += sequencer.finish_backward(task=0)
    freed = [one.unit for one in events if one.kind is EventKind.FREE_SUBGROUP]
    assert freed == ([1] if steps_in_backward else [])


# -- random programs ---------------------------------------------------------------------------


@given(st.data())
def test_any_program_is_lawful(data: st.DataObject) -> None:
    plan = data.draw(plans())
    Driver(plan).run(data.draw(programs(plan)))


@given(st.data())
def test_a_backward_that_dies_leaves_nothing(data: st.DataObject) -> None:
    plan = data.draw(plans())
    Driver(plan).run(data.draw(programs(plan, may_die=True)))


@given(st.data())
def test_gathered_units_are_bounded(data: st.DataObject) -> None:
    """Without recomputation, which gathers more units, and UNHOOKED outcomes, which keep units."""
    plan = data.draw(plans(reshard_all=True))
    outcomes = (*DIFFERENTIABLE_OR_NOT, Outcome.FAILED)
    program = data.draw(programs(plan, outcomes=outcomes, recomputes=None))
    Driver(plan, check_bound=True).run(program)


def with_missing(program: Program, masks: list[int]) -> Program:
    return tuple(
        Backward(op.passes, masks[i % len(masks)], op.recomputes, retain=op.retain)
        if isinstance(op, Backward)
        else op
        for i, op in enumerate(program)
    )


@given(st.data())
def test_ranks_that_reach_different_calls_agree(data: st.DataObject) -> None:
    """A rank recomputes the calls that its own backward reaches; here, inside one unit.

    A checkpointed region of several units is gathered again only on the ranks that reach it, so
    these ranks would have to take the same branches.
    """
    plan = data.draw(plans())
    itself = st.builds(
        Recompute, reentrant=st.just(False), region=st.just("self"), stop_after=st.just(1)
    )
    program = data.draw(programs(plan, recomputes=itself))
    masks = st.lists(st.integers(0, 255), min_size=1, max_size=4)
    one, other = Driver(plan), Driver(plan)
    one.run(with_missing(program, [0]))
    other.run(with_missing(program, data.draw(masks)))
    assert one.monitor.collectives == other.monitor.collectives
    kinds = (EventKind.FORWARD, EventKind.BACKWARD)
    assert [e for e in one.monitor.events if e.kind not in kinds] == [
        e for e in other.monitor.events if e.kind not in kinds
    ]


@given(st.data())
def test_a_repeated_pass_gathers_ahead(data: st.DataObject) -> None:
    plan = data.draw(plans().filter(lambda plan: plan.prefetch > 0))
    outcomes = (*DIFFERENTIABLE_OR_NOT, Outcome.UNHOOKED)
    call = data.draw(call_specs(plan, outcomes))
    driver = Driver(plan)
    other = data.draw(st.sampled_from([(), (Backward(),), (Backward(), Forward(call))]))
    driver.run((Forward(call, grad=False), Forward(call), *other))
    for grad in (False, True):
        start = len(driver.monitor.snapshots)
        driver.run((Forward(call, grad=grad), Backward()))
        for kind in (EventKind.FORWARD, EventKind.BACKWARD):
            check_gathers_ahead(driver.monitor, start, kind)


def check_gathers_ahead(monitor: Monitor, start: int, kind: EventKind) -> None:
    """While a unit computes, the next one that has parameters is gathered."""
    computes = [snapshot for snapshot in monitor.snapshots[start:] if snapshot.event.kind is kind]
    for i, snapshot in enumerate(computes):
        following = [each.event.unit for each in computes[i + 1 :]]
        units = [unit for unit in following if monitor.units[unit].gathered_bytes]
        assert not units or monitor.labels[units[0]] in snapshot.gathered, str(snapshot.event)
