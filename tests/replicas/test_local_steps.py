"""Replicas that train alone for many steps and synchronize through a manager, and may die."""

import itertools
import zlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.optim.fragments import fragments_of
from shardwise.replicas.group import Row
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import local_of
from tests.models import Block, Stack
from tests.replicas.diloco import Simulation, train
from tests.replicas.job import Job, Seat
from tests.replicas.training import MODELS

DILOCO = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ROWS = {
    "diloco": sw.Outer(every=4, dtype="float64"),
    "streaming": sw.Outer(every=6, fragments=3, delay=2, mixing=0.5, dtype="float64"),
    "int4": sw.Outer(every=4, fragments=2, delay=1),
}


def checksum(tensors: list[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        local = local_of(tensor).detach().contiguous().reshape(-1)
        total = zlib.crc32(local.view(torch.uint8).numpy().tobytes(), total)
    return total


def program(
    seat: Seat,
    *,
    row: str,
    steps: int,
    dies: int = -1,
    waits: int = -1,
    seed: int = 3,
    raises: int = -1,
    kind: str = "",  # of model
    rounds: int = 0,  # before, without the other replicas
) -> None:
    torch.manual_seed(seed)
    model = sw.fully_shard(MODELS[kind]().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    manager = seat.manager(use_async_quorum=False, init_sync=False)
    outer = sw.outer_optimizer(model, optimizer, ROWS[row], manager=manager)
    outer.param_groups[0]["rounds"] = rounds
    seat.log("ready")
    seat.wait_for("start")
    while outer.local_steps < steps:
        step = outer.local_steps
        if step == waits:
            seat.wait_for("go on")
        if step == dies:
            seat.die()
        if step == raises and seat.rank == 1:
            local_of(next(model.parameters())).data.fill_(torch.nan)
        before = outer.sent_bytes
        train(model, optimizer, seat.number, range(step, step + 1))
        shared = [state["anchor"] for state in outer.state.values()]
        rounded = [local_of(s["residual"]) for s in outer.state.values() if "residual" in s]
        seat.log(
            "step",
            step=outer.local_steps,
            first=step,
            round=manager.current_step(),
            shared=checksum(shared),
            sent=outer.sent_bytes - before,
            planned=outer.planned_bytes(step + 1),
            rounded=sum(float(one.abs().sum()) for one in rounded),
            calls=float(getattr(model, "calls", 0)),
            random=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        )
    whole = [tensor.full_tensor() for tensor in (*model.parameters(), *shared)]
    if seat.rank == 0:
        torch.save(whole, seat.folder / f"{seat.number}.pt")
    manager.shutdown(wait=False)


def assert_same_shared_bits(job: Job, numbers: range) -> None:
    """Replicas that have applied the same rounds share the same bits."""
    for rank in range(job.num_ranks):
        bits: dict[int, int] = {}
        for number in numbers:
            for line in job.lines(number, rank, "step"):
                assert bits.setdefault(line["round"], line["shared"]) == line["shared"], line


@pytest.mark.parametrize("row", ["streaming", pytest.param("diloco", marks=pytest.mark.thorough)])
def test_replicas_of_a_manager_equal_diloco_in_one_process(row: str) -> None:
    with Job(num_ranks=2, min_replicas=2) as job:
        job.finish(*job.begin(2, program, row=row, steps=14))
        simulation = Simulation(ROWS[row], 0.05, DILOCO)
        model = sw.fully_shard(Stack().double(), units=Block)
        places = {id(p): index for index, p in enumerate(model.parameters())}
        members = [
            [places[id(p)] for p in one.parameters]
            for one in fragments_of(runtime_of_root(model), ROWS[row])
        ]
        for step in range(14):
            simulation.run(range(step, step + 1), members)
        for number in range(2):
            found = torch.load(job.folder / f"{number}.pt", weights_only=True)
            own = [*simulation.replicas[number].parameters(), *simulation.shared]
            for value, expected in zip(found, own, strict=True):
                torch.testing.assert_close(value, expected.data, rtol=1e-10, atol=1e-10)
        assert_same_shared_bits(job, range(2))
        for line in job.lines(0, 0, "step"):
            assert line["sent"] == line["planned"]


@pytest.mark.parametrize(
    ("row", "num_replicas"),
    [
        pytest.param("diloco", 2, marks=pytest.mark.thorough),
        ("int4", 2),
        pytest.param("streaming", 2, marks=pytest.mark.thorough),
        pytest.param("diloco", 3, marks=pytest.mark.thorough),
        pytest.param("int4", 3, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_replica_takes_the_state_of_another_one(row: str, num_replicas: int) -> None:
    last = num_replicas - 1
    with Job(num_ranks=2, min_replicas=1) as job:
        options: dict[str, Any] = {"row": row, "steps": 40, "kind": "noisy"}
        stay = [job.start(n, program, waits=24, **options) for n in range(last)]
        died = job.start(last, program, dies=9, **options)
        job.allow_when_ready(num_replicas)
        died.join_killed()
        for number in range(last):
            job.wait_until(partial(_has_reached, job, number, 24))
        back = job.start(last, program, **options)
        job.wait_until_asked()
        job.allow("go on")
        job.finish(*stay, back)
        assert_same_shared_bits(job, range(num_replicas))
        for number, rank in itertools.product(range(last), range(2)):
            steps = [line["step"] for line in job.lines(number, rank, "step")]
            assert steps == list(range(1, 41)), "the others finish every step"
        returned = [line for line in job.lines(last, 0, "step") if line["step"] > 9]
        assert returned[0]["first"] == 0
        assert 24 <= returned[0]["step"] <= 24 + 4, "it takes the others' state in its first step"
        own = {line["step"]: line for line in job.lines(0, 0, "step")}
        if row == "int4":
            assert own[returned[0]["step"]]["rounded"] > 0
            assert returned[0]["rounded"] == 0, "it has sent nothing yet"
        for line, key in itertools.product(returned, ("calls", "random")):
            assert line[key] == own[line["step"]][key], (line["step"], key)


def test_replicas_that_were_cut_off_take_the_state_of_one_of_them() -> None:
    """As with checkpoints of the same round, of replicas that had trained alone."""
    with Job(num_ranks=1, min_replicas=2) as job:
        options: dict[str, Any] = {"row": "diloco", "steps": 12, "rounds": 2}
        replicas = [job.start(n, program, seed=n, **options) for n in range(2)]
        job.allow_when_ready(2)
        job.finish(*replicas)
        assert_same_shared_bits(job, range(2))
        assert "was cut off from replicas that trained on" in job.output.read_text("utf-8")


def _has_reached(job: Job, number: int, step: int) -> bool:
    return any(line["step"] >= step for line in job.lines(number, 0, "step"))


def test_a_replica_that_is_not_finite_does_not_synchronize() -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, row="diloco", steps=12)
        fails = job.start(1, program, row="diloco", steps=12, raises=5)
        job.allow_when_ready(2)
        assert fails.join() == [1, 1]
        assert stays.join() == [0, 0]
        assert "StepError: first.weight of this replica is not finite" in job.output.read_text()
        values = torch.load(job.folder / "0.pt", weights_only=True)
        assert all(value.isfinite().all() for value in values)


@pytest.mark.thorough  # test_elastic.py shows it, too
def test_replicas_that_begin_with_different_values_are_refused() -> None:
    with Job(num_ranks=2, min_replicas=2) as job:
        replicas = [job.start(n, program, row="diloco", steps=8, seed=n) for n in range(2)]
        job.allow("start")
        assert [replica.join() for replica in replicas] == [[1, 1], [1, 1]]
        assert "PlanError: replicas begin with different parameters" in job.output.read_text()


class Idle:
    """A manager that is asked for nothing but its options."""

    _use_async_quorum = True
    _replica_id = "replica0"
    _user_state_dicts: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_options_that_a_manager_cannot_have_are_refused() -> None:
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(PlanError, match="use_async_quorum=False"):
        sw.outer_optimizer(model, optimizer, sw.Outer(), manager=Idle())
    manager = Idle()
    manager._use_async_quorum = False
    with pytest.raises(PlanError, match=r"delay of at most every // fragments = 2"):
        sw.outer_optimizer(
            model, optimizer, sw.Outer(every=4, fragments=2, delay=3), manager=manager
        )
    with pytest.raises(PlanError, match="expected one of them"):
        sw.outer_optimizer(model, optimizer, sw.Outer())


class OtherReplica:
    """Stands for a group in which this replica takes a state, when the fragment 1 is due."""

    step, history, num_replicas, has_joined = 3, 0, 2, False

    def __init__(self) -> None:
        self.num_rounds = 0

    def begin(self) -> None:
        self.num_rounds += 1
        self.has_joined = self.num_rounds == 1

    def meet(self, *own: int, counts: bool) -> list[Row]:
        joins = [Row(1, 0, 0, 0, 0, own[0], 1, 8), Row(0, 0, 0, 0, 0, *own)]
        return joins if self.has_joined else [Row(counts, 0, 0, 0, 0, *own)] * 2

    def counted(self) -> list[bool]:
        return [True, not self.has_joined]

    def gather(self, own: Tensor) -> Any:
        return lambda: [own, own]

    def commit(self) -> bool:
        return True


@pytest.mark.parametrize("delay", [0, 1])
def test_a_replica_that_joins_ends_the_round_that_is_due_in_others_alone(delay: int) -> None:
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    outer = sw.Outer(every=8, fragments=2, delay=delay)  # the fragment 0 is due after step 4
    manager = Idle()
    manager._use_async_quorum = False
    handle: Any = sw.outer_optimizer(model, optimizer, outer, manager=manager)
    handle.group = group = OtherReplica()
    handle._has_met = True
    rounds = []
    for step in range(9):
        train(model, optimizer, 0, range(step, step + 1))
        rounds.append((handle.local_steps, group.num_rounds))
    # After step 4, it continues with step 8 of the others.
    joined = [(8, 1), (9, 1), (10, 1), (11, 1), (12, 2), (13, 2)]
    assert rounds == [(1, 0), (2, 0), (3, 0), *joined]
