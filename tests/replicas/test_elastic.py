"""`sw.elastic`: equal to one process, whatever happens to the replicas."""

import copy
import itertools
import re
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.directory import MARKER, latest
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.errors import PeerLost, PeerSilent
from shardwise.replicas.group import ReplicaGroup, Row
from tests.models import Block, Stack
from tests.replicas.job import Job
from tests.replicas.training import (
    SEED,
    assert_equal_to_one_process,
    assert_same_bits,
    batch_of,
    program,
    saved_in,
    saves_of,
)

THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("strategy", "is_async", "kind", "init_sync"),
    [
        ("fsdp", True, "", True),
        ("zero2", False, "branches", False),
        pytest.param("ddp", True, "", False, marks=THOROUGH),
        pytest.param("fsdp", True, "branches", False, marks=THOROUGH),
        pytest.param("zero1", False, "", True, marks=THOROUGH),
    ],
)
def test_replicas_equal_one_process(
    strategy: str, is_async: bool, kind: str, init_sync: bool
) -> None:
    """With `init_sync`, torchft gives zeros to replicas that "heal" in the first step, and divides
    by their number as well.
    """
    options: dict[str, Any] = {"strategy": strategy, "is_async": is_async, "kind": kind}
    options["init_sync"] = init_sync
    with Job(num_ranks=2, min_replicas=2) as job:
        job.finish(*job.begin(2, program, steps=6, **options))
        assert_equal_to_one_process(job, 6, range(2), kind=kind)
        for number in range(2):
            assert [line["num_replicas"] for line in job.lines(number, 0, "step")] == [2] * 6


@pytest.mark.parametrize(
    ("num_ranks", "shared", "own"),
    [
        pytest.param(2, {"micro_batches": 3, "kind": "frozen"}, {}, id="accumulation, frozen"),
        pytest.param(4, {}, {"strategy": "hsdp", "mesh": (2, 2)}, id="hsdp inside", marks=THOROUGH),
    ],
)
def test_options_equal_one_process(
    num_ranks: int, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    with Job(num_ranks=num_ranks, min_replicas=2) as job:
        job.finish(*job.begin(2, program, steps=5, **shared, **own))
        assert_equal_to_one_process(job, 5, range(2), **shared)


@pytest.mark.thorough
def test_replicas_keep_the_same_bits_in_mixed_precision() -> None:
    precision = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "backward"), back_at=5, steps=9, precision=precision)
        for rank in range(2):
            lines = {line["step"]: line for line in job.lines(0, rank, "step")}
            assert_same_bits(lines, job.lines(1, rank, "step"))
            assert len(lines) == 9


@pytest.mark.parametrize(
    ("init_sync", "own"),
    [
        (True, {"differs": True}),
        pytest.param(False, {"differs": True}, marks=THOROUGH),
        pytest.param(True, {"seed": SEED + 1}, marks=THOROUGH),
        pytest.param(False, {"seed": SEED + 1}, marks=THOROUGH),
    ],
)
def test_replicas_that_begin_with_different_values_are_refused(
    init_sync: bool, own: dict[str, Any]
) -> None:
    """Also on ranks that have found no difference. With `init_sync`, torchft would give each rank
    the shard of another replica.
    """
    with Job(num_ranks=2, min_replicas=2) as job:
        replicas = [
            job.start(number, program, steps=2, init_sync=init_sync, **own if number else {})
            for number in range(2)
        ]
        job.allow("start")
        assert [replica.join() for replica in replicas] == [[1, 1], [1, 1]]
        text = job.output.read_text("utf-8")
        assert text.count("PlanError: replicas begin with different parameters") == 4


def kill_and_return(
    job: Job,
    dies: tuple[int, str],
    back_at: int,
    steps: int,
    num_replicas: int = 2,
    **options: Any,
) -> None:
    """The last replica dies, the others train on to step ``back_at``, and it comes back."""
    last = num_replicas - 1
    options["steps"] = steps
    stay = [job.start(n, program, waits=(back_at,), **options) for n in range(last)]
    died = job.start(last, program, dies=dies, **options)
    job.allow_when_ready(num_replicas)
    died.join_killed()
    for number in range(last):
        job.wait_until(partial(_has_reached, job, number, back_at - 1))
    back = job.start(last, program, **options)
    job.wait_until_asked()
    job.allow(f"step {back_at}")
    job.finish(*stay, back)


def _last_step(job: Job, number: int) -> int:
    return max((line["step"] for line in job.lines(number, 0, "step")), default=-1)


def _has_reached(job: Job, number: int, step: int) -> bool:
    return _last_step(job, number) >= step


PLACES = ["forward", "backward", "reduction", "optimizer", "end"]


@pytest.mark.parametrize(
    ("num_replicas", "place"),
    [
        (2, "backward"),
        *(pytest.param(2, place, marks=THOROUGH) for place in PLACES if place != "backward"),
        *(pytest.param(3, place, marks=THOROUGH) for place in PLACES),
    ],
)
def test_a_killed_replica_returns_with_the_bits_of_the_others(
    num_replicas: int, place: str
) -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, place), back_at=5, steps=9, num_replicas=num_replicas)
        assert_equal_to_one_process(job, 9, range(num_replicas))
        returned = [line["step"] for line in job.lines(num_replicas - 1, 0, "step")]
        assert returned[-2:] == [7, 8], "within two steps after its return"
        # A sample is a replica's part of a step. None counts twice.
        *others, own = (
            [line["step"] for line in job.lines(number, 0, "counts")]
            for number in range(num_replicas)
        )
        assert all(counts == list(range(9)) for counts in others)
        if place == "backward":  # later, its samples of this step may count
            assert own[2] in (5, 6, 7)
            assert own == [0, 1, *range(own[2], 9)], "those of the dead one are skipped"


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=THOROUGH)])
def test_a_replica_that_is_killed_in_a_save_leaves_the_last_checkpoint_whole(
    num_replicas: int,
) -> None:
    last = num_replicas - 1
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "save"), 5, 9, num_replicas, saves=1)
        assert (saves_of(job.folder, last) / "step-2" / MARKER).exists(), "killed in the save"
        assert not (saves_of(job.folder, last) / "step-2" / MANIFEST).exists()
        before = saves_of(job.folder, last) / "step-1"
        newest = [latest(saves_of(job.folder, number)) for number in range(num_replicas)]
        assert [path and path.name for path in newest] == ["step-8"] * num_replicas
        paths = [before, *filter(None, newest)]
        assert_equal_to_one_process(job, 9, range(num_replicas), map(saved_in, paths))


def test_all_tokens_of_all_replicas_have_the_same_weight() -> None:
    """While a replica is away, and takes a state, its tokens do not count."""
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "optimizer"), back_at=5, steps=9, tokens=True)
        assert_equal_to_one_process(job, 9, range(2), tokens=True)
        assert {line["num_replicas"] for line in job.lines(0, 0, "step")} == {1, 2}


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=THOROUGH)])
def test_a_replica_takes_buffers_and_random_states(is_async: bool) -> None:
    """With an asynchronous quorum in a step that does not count, and is repeated."""
    with Job(num_ranks=2, min_replicas=1) as job:
        options: dict[str, Any] = {"steps": 9, "kind": "noisy", "is_async": is_async}
        stays = job.start(0, program, waits=(4,), raises=(4, "backward"), **options)
        job.allow_when_ready(1)
        job.wait_until(partial(_has_reached, job, 0, 3))
        joins = job.start(1, program, **options)
        job.wait_until_asked()
        job.allow("step 4")
        job.finish(stays, joins)
        for rank in range(2):
            own = {line["step"]: line for line in job.lines(0, rank, "step")}
            assert_same_bits(own, job.lines(1, rank, "step"))
            assert [own[step]["calls"] for step in range(9)] == list(range(1, 10))
        if is_async:
            assert [line["step"] for line in job.lines(1, 0, "step")] == [4, 5, 6, 7, 8]
            assert job.lines(1, 0, "repeats")


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=THOROUGH)])
def test_an_exception_of_one_rank_is_undone_and_the_others_repeat_the_step(
    is_async: bool,
) -> None:
    with Job(num_ranks=2, min_replicas=2) as job:
        job.finish(*job.begin(2, program, steps=5, raises=(2, "clip"), is_async=is_async))
        assert_equal_to_one_process(job, 5, range(2))
        assert [line["num_replicas"] for line in job.lines(0, 0, "step")] == [2] * 5
        for number, rank in itertools.product(range(2), range(2)):
            repeats = [line["step"] for line in job.lines(number, rank, "repeats")]
            assert repeats
            assert set(repeats) == {2}


@pytest.mark.thorough
def test_two_replicas_that_die_in_the_same_step_return() -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        options: dict[str, Any] = {"steps": 9}
        stays = job.start(0, program, waits=(5,), **options)
        died = [job.start(n, program, dies=(2, "backward"), **options) for n in (1, 2)]
        job.allow_when_ready(3)
        for replica in died:
            replica.join_killed()
        job.wait_until(partial(_has_reached, job, 0, 4))
        back = [job.start(n, program, **options) for n in (1, 2)]
        job.wait_until_asked(2)
        job.allow("step 5")
        job.finish(stays, *back)
        assert_equal_to_one_process(job, 9, range(3))


@pytest.mark.thorough
def test_a_replica_that_took_a_part_of_a_state_ends() -> None:
    """Each rank that joins asks a different replica, so one of them asks the one that dies."""
    with Job(num_ranks=2, min_replicas=1) as job:
        gives = job.start(0, program, waits=(3,), dies_giving=True)
        gives.may_fail = True
        stays = job.start(1, program, waits=(3,), pause=0.05)
        job.allow_when_ready(2)
        for number in range(2):
            job.wait_until(partial(_has_reached, job, number, 2))
        takes = job.start(2, program)
        takes.may_fail = True
        job.wait_until_asked()
        job.allow("step 3")
        job.wait_until(lambda: any(rank.exitcode is not None for rank in gives.ranks))
        gives.kill()  # its launcher does
        assert takes.join() == [1, 1]
        assert "StepError: the replica whose state this one was taking is gone" in (
            job.output.read_text("utf-8")
        )
        back = job.start(2, program)
        job.wait_until(lambda: bool(job.lines(2, 0, "step")))
        job.end_after(_last_step(job, 1) + 20)
        job.finish(stays, back)
        for rank in range(2):
            lines = {line["step"]: line for line in job.lines(1, rank, "step")}
            assert_same_bits(lines, job.lines(2, rank, "step"))
            assert sorted(lines) == list(range(len(lines)))


def _let_one_fail(job: Job, *, is_async: bool, **options: Any) -> None:
    """Train a replica for 8 steps, and start another one with ``options``, which has to fail."""
    stays = job.start(0, program, steps=8, waits=(4,), is_async=is_async)
    job.allow_when_ready(1)
    job.wait_until(partial(_has_reached, job, 0, 3))
    joins = job.start(1, program, steps=8, is_async=is_async, **options)
    joins.may_fail = True
    job.wait_until_asked()
    job.allow("step 4")
    assert joins.join() == [1] * job.num_ranks
    job.finish(stays)
    assert [line["step"] for line in job.lines(0, 0, "step")] == list(range(8))


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=THOROUGH)])
def test_a_replica_that_cannot_fetch_a_state_ends_and_the_others_train_on(is_async: bool) -> None:
    """They would wait for it until a timeout, in each attempt of each step."""
    with Job(num_ranks=2, min_replicas=1) as job:
        _let_one_fail(job, is_async=is_async, unreachable=True)
        text = job.output.read_text("utf-8")
        cannot = "StepError: this replica cannot take the state of another one"
        assert f"{cannot} (no route to host)" in text
        assert f"{cannot} (see its other ranks)" in text


def test_replicas_cannot_take_a_state_in_the_first_step_and_end() -> None:
    """With `init_sync`, torchft has all of them take one, which none needs."""
    with Job(num_ranks=2, min_replicas=2) as job:
        options: dict[str, Any] = {"steps": 2, "unreachable": True, "init_sync": True}
        replicas = [job.start(number, program, **options) for number in range(2)]
        job.allow_when_ready(2)
        for replica in replicas:
            replica.may_fail = True
        # The other one, if the manager spares it, would wait for a second replica.
        job.wait_until(lambda: any(replica.has_ended_with(1) for replica in replicas))
        assert "another one (no route to host)" in job.output.read_text("utf-8")


def test_all_ranks_of_a_replica_take_a_state_if_one_of_them_was_cut_off() -> None:
    """As with checkpoints of the same step, of which the shards of one rank differ."""
    with Job(num_ranks=2, min_replicas=2) as job:
        options: dict[str, Any] = {"steps": 6, "first": 3}
        replicas = [job.start(n, program, differs=n == 1, **options) for n in range(2)]
        job.allow_when_ready(2)
        job.finish(*replicas)
        for rank in range(2):
            lines = {line["step"]: line for line in job.lines(0, rank, "step")}
            assert_same_bits(lines, job.lines(1, rank, "step"))
            assert job.lines(1, rank, "repeats")[0]["then"] == 0


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=THOROUGH)])
def test_a_replica_that_joins_with_the_number_of_another_one_ends(is_async: bool) -> None:
    with Job(num_ranks=1, min_replicas=1) as job:
        _let_one_fail(job, is_async=is_async, replica_id="other0")
        assert "PlanError: two replicas have the number 0" in job.output.read_text("utf-8")


def test_replicas_exchange_their_table_once_in_a_quorum_that_holds() -> None:
    """A failed step and any change of the replicas make another quorum."""
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "optimizer"), back_at=6, steps=14, raises=(10, "backward"))
        assert_equal_to_one_process(job, 14, range(2))
        for rank in range(2):
            lines = job.lines(0, rank, "step")
            pairs = list(itertools.pairwise(lines))
            for before, line in pairs:
                if line["quorum"] == before["quorum"]:
                    again = before["num_replicas"] < before["members"]  # not all have counted
                    assert line["exchanges"] - before["exchanges"] == again, line["step"]
                    assert line["members"] == before["members"], line["step"]
            assert any(line["exchanges"] == before["exchanges"] for before, line in pairs)
            assert {line["members"] for line in lines} == {1, 2}
            quorums = [line["quorum"] for line in lines]
            assert quorums == sorted(quorums)
            assert quorums[9] < quorums[10], "the step has failed in one of its ranks"


def test_too_few_replicas_are_named_until_one_returns() -> None:
    with Job(num_ranks=1, min_replicas=1) as job:
        stays = job.start(0, program, steps=6, minimum=2, pause=0.05)
        died = job.start(1, program, steps=6, minimum=2, dies=(2, "forward"))
        job.allow_when_ready(2)
        died.join_killed()
        job.wait_until(lambda: len(job.lines(0, 0, "repeats")) > 3)
        back = job.start(1, program, steps=6, minimum=2)
        job.finish(stays, back)
        assert_equal_to_one_process(job, 6, range(2))
        assert_said(job, "does not count, and is repeated: too few replicas")


@pytest.mark.parametrize(
    ("is_async", "change"),
    [
        (True, {"kind": "deep"}),
        pytest.param(False, {"strategy": "zero2"}, marks=THOROUGH),
    ],
)
def test_a_replica_that_runs_another_program_cannot_join(
    is_async: bool, change: dict[str, Any]
) -> None:
    """It ends, and the others train on."""
    with Job(num_ranks=1, min_replicas=1) as job:
        stays = job.start(0, program, steps=8, waits=(4,), is_async=is_async)
        job.allow_when_ready(1)
        job.wait_until(partial(_has_reached, job, 0, 3))
        joins = job.start(1, program, steps=8, is_async=is_async, **change)
        joins.may_fail = True
        job.wait_until_asked()
        job.allow("step 4")
        assert joins.join() == [1]
        job.finish(stays)
        assert [line["step"] for line in job.lines(0, 0, "step")] == list(range(8))
        text = job.output.read_text("utf-8")
        assert "start all replicas with the same program and options" in text
        assert "PlanError" in text


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=THOROUGH)])
def test_a_stopped_replica_is_left_out_and_heals(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open while it does not answer, so the step fails after a timeout."""
    monkeypatch.setattr("tests.replicas.job.TIMEOUT", timedelta(seconds=5))
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, steps=9, waits=(5,))
        stopped = job.start(1, program, steps=9, waits=(2,))
        job.allow_when_ready(2)
        job.wait_until(lambda: _last_step(job, 1) == 1)
        stopped.kill(signal.SIGSTOP)
        job.wait_until(lambda: _last_step(job, 0) == 4)
        time.sleep(seconds)
        stopped.kill(signal.SIGCONT)
        job.allow("step 2")
        job.wait_until_asked()
        job.allow("step 5")
        job.finish(stays, stopped)
        assert_equal_to_one_process(job, 9, range(2))
        assert _last_step(job, 1) == 8
        assert_said(job, r"replica 1 left.*; .* s lost")
        assert_said(job, r"takes the state of another replica")
        assert_said(job, r"replica 1 joined; .* s lost")


@pytest.mark.thorough  # 8 s without a sign of life, twice
@pytest.mark.parametrize("is_async", [False, True])
def test_the_other_ranks_of_a_replica_end_after_the_death_of_one_without_a_launcher(
    is_async: bool,
) -> None:
    """They would wait for its quorum, and the other replica for theirs."""
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, steps=9, is_async=is_async)
        loses = job.start(1, program, steps=9, waits=(3,), is_async=is_async)
        job.allow_when_ready(2)
        job.wait_until(lambda: all(len(job.lines(1, rank, "step")) == 3 for rank in range(2)))
        loses.kill_rank(1)
        job.allow("step 3")
        assert loses.join() == [1, -signal.SIGKILL]
        job.finish(stays)
        assert [line["step"] for line in job.lines(0, 0, "step")] == list(range(9))
        text = job.output.read_text("utf-8")
        assert re.search("^shardwise.errors.Peer(Silent|Lost): ", text, re.MULTILINE), text


def assert_said(job: Job, pattern: str) -> None:
    text = job.output.read_text("utf-8")
    assert re.search(rf"^step \d+: {pattern}", text, re.MULTILINE), text


class Unasked:
    """A manager of which only the callbacks are registered."""

    _replica_id = "replica0"

    def __init__(self) -> None:
        self._user_state_dicts: dict[str, object] = {}

    def register_state_dict_fn(self, name: str, *callbacks: object) -> None:
        self._user_state_dicts[name] = callbacks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: pytest.fail(f"{name} was called")


def test_steps_outside_of_the_block_are_refused() -> None:
    torch.manual_seed(SEED)
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    replicas = sw.elastic(model, optimizer, Unasked())
    batch = batch_of(0, 0, 0)
    with pytest.raises(sw.StepError, match=r"backward inside `with replicas.step\(\)`"):
        model(batch).sum().backward()
    with pytest.raises(sw.StepError, match=r"optimizer.step\(\) once in each `with"):
        optimizer.step()
    with pytest.raises(sw.StepError, match=r"and call optimizer.step\(\) without it"):
        optimizer.step(lambda: 0.0)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch), model(batch))
    replicas.remove()
    model(batch).sum().backward()
    optimizer.step()


def test_what_cannot_be_a_replica_is_refused() -> None:
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(sw.PlanError, match=r"expects a torchft.Manager, got dict"):
        sw.elastic(model, optimizer, {})
    unnumbered = Unasked()
    unnumbered._replica_id = None  # type: ignore[assignment]
    with pytest.raises(sw.PlanError, match=r'replica_id=None; expected .* replica_id="replica0"'):
        sw.elastic(model, optimizer, unnumbered)
    handle = sw.optimizer_in_backward(model, optimizer)
    with pytest.raises(sw.PlanError, match=r"call remove\(\) on its handle"):
        sw.elastic(model, optimizer, Unasked())
    handle.remove()
    with pytest.raises(sw.PlanError, match="is not in the optimizer, so a replica that joins"):
        sw.elastic(model, torch.optim.AdamW(list(model.parameters())[:-1]), Unasked())
    replicas = sw.elastic(model, optimizer, Unasked())
    with pytest.raises(sw.PlanError, match="decide whether a step counts before the optimizer"):
        sw.optimizer_in_backward(model, optimizer)
    with pytest.raises(sw.PlanError, match="the model is elastic already"):
        sw.outer_optimizer(model, optimizer, sw.Outer(), manager=Unasked())
    replicas.remove()
    with pytest.raises(sw.PlanError, match=r"Manager has been used; create a new one"):
        sw.elastic(model, optimizer, replicas.group.manager)
    sw.elastic(model, optimizer, Unasked()).remove()
    ignored = Stack().double()
    sw.fully_shard(ignored, units=Block, ignored_params=[ignored.first.weight])  # type: ignore[list-item]
    with pytest.raises(sw.PlanError, match=r"first.weight is trainable but not sharded"):
        sw.elastic(ignored, torch.optim.AdamW(ignored.parameters()), Unasked())


RIGHT, WRONG = 1, 2


@pytest.mark.parametrize(
    ("replicas", "end"),
    [
        pytest.param([(1, RIGHT), (1, RIGHT)], [False, False], id="same"),
        pytest.param([(1, RIGHT), (0, WRONG)], [False, True], id="joins"),
        pytest.param([(1, RIGHT), (0, RIGHT), (0, WRONG)], [False, False, True], id="two join"),
        pytest.param([(1, RIGHT), (1, WRONG), (1, RIGHT)], [False, True, False], id="begin"),
        pytest.param([(1, RIGHT), (1, WRONG)], [True, True], id="two begin"),
        pytest.param([(0, RIGHT), (0, WRONG)], [False, False], id="none counts"),
    ],
)
def test_only_replicas_with_another_program_than_most_end(
    replicas: list[tuple[int, int]], end: list[bool]
) -> None:
    rows = [Row(counts, 0, 0, number, kind) for number, (counts, kind) in enumerate(replicas)]
    is_same = len({row.kind for row in rows}) == 1
    ended = []
    for row in rows:
        group = object.__new__(ReplicaGroup)
        group._number, group._kind, group._description = row.number, row.kind, "Stack"
        with mock.patch.object(group, "_fail") as failed:
            try:
                assert group._can_meet(rows) == is_same
                ended.append(False)
            except sw.PlanError:
                ended.append(True)
        assert failed.called != is_same, "the step does not count"
    assert ended == end


def test_a_replica_whose_manager_is_shut_down_says_to_restart_it() -> None:
    model = sw.fully_shard(Stack().double(), units=Block)
    manager = mock.MagicMock(_replica_id="replica0")
    replicas = sw.elastic(model, torch.optim.AdamW(model.parameters()), manager)
    replicas.group._fail(PeerSilent("rank 1 does not respond"))
    manager.shutdown.assert_called_once()
    with (
        pytest.raises(PeerLost, match="rank 1 does not respond; restart this replica"),
        replicas.step(),
    ):
        pytest.fail("the step began")
    manager.start_quorum.assert_not_called()


@pytest.mark.thorough
def test_a_lighthouse_that_ends_and_starts_again_stops_nothing() -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        replicas = [
            job.start(number, program, steps=10, waits=(4,), retries=20) for number in range(2)
        ]
        job.allow_when_ready(2)
        for number in range(2):
            job.wait_until(partial(_has_reached, job, number, 3))
        job.kill_lighthouse()
        job.allow("step 4")
        time.sleep(2.0)  # the replicas ask a lighthouse that is not there
        job.start_lighthouse()
        job.finish(*replicas)
        assert_equal_to_one_process(job, 10, range(2))
        assert_said(job, r"waited .* s for the lighthouse and other replicas; .* s lost")


def test_a_replica_that_dies_while_it_takes_a_state_is_left_out() -> None:
    """It is killed between the copy and the step; then another one takes its place."""
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, steps=12, waits=(4, 8))
        job.allow_when_ready(1)
        job.wait_until(partial(_has_reached, job, 0, 3))
        dies = job.start(1, program, steps=12, dies_healing=True)
        job.wait_until_asked()
        job.allow("step 4")
        dies.join_killed()
        job.wait_until(partial(_has_reached, job, 0, 7))
        back = job.start(1, program, steps=12)
        job.wait_until_asked()
        job.allow("step 8")
        job.finish(stays, back)
        assert_equal_to_one_process(job, 12, range(2))
        assert [line["step"] for line in job.lines(0, 0, "step")] == list(range(12))
        assert_said(job, r".*(replica 1 left|repeated|waited).*; .* s lost")
        assert_said(job, r"replica 1 joined.*; .* s lost")
