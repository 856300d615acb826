"""The rank pool keeps what it promises: quick, exact about failures, and never spoilt."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RankFailed, on_ranks, pool_processes, ready_pool, run_on


def sum_of_ranks(scale: int) -> float:
    total = torch.full((3,), float(scale * dist.get_rank()))
    dist.all_reduce(total)
    return float(total[0])


def own_number() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def random_tensor() -> torch.Tensor:
    return torch.rand(3)


def raise_on(failing: int) -> int:
    rank = dist.get_rank()
    if rank == failing:
        number_of_cakes = 41
        assert number_of_cakes == rank + 100
    return rank


def raise_before_collective(failing: int) -> None:
    print("rank", dist.get_rank(), "is at work")  # noqa: T201 (the report has it)
    dist.barrier()  # until all ranks are here
    if dist.get_rank() == failing:
        raise ValueError("no cakes")
    dist.barrier()


def make_groups_on(rank: int) -> None:
    """Leave the ranks disagreeing on how many groups there are."""
    if dist.get_rank() == rank:
        dist.new_group([rank], use_local_synchronization=True)
        raise ValueError("left in the middle")


def sum_in_new_group() -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    return float(total)


def exit_on(failing: int) -> None:
    if dist.get_rank() == failing:
        print("about to leave", file=sys.stderr)  # noqa: T201
        os._exit(7)


def kill_on(failing: int) -> None:
    if dist.get_rank() == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_in_a_named_place() -> None:
    time.sleep(60)


def hang_on(failing: int) -> None:
    if dist.get_rank() == failing:
        sleep_in_a_named_place()
    dist.barrier()


def leave_a_child_and_exit_on(failing: int) -> None:
    """The child inherits the rank's socket, which stays open until the pool kills the child."""
    if dist.get_rank() == failing:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(3)


def unpicklable() -> Callable[[], None]:
    return lambda: None


def failure_of(
    function: Callable[..., object], *args: object, deadline: float = 20.0
) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        run_on(2, function, *args, deadline=deadline)
    return caught.value


def assert_works() -> None:
    assert run_on(2, sum_of_ranks, 10) == [10.0, 10.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_are_by_rank(world_size: int) -> None:
    expected = [(rank, world_size) for rank in range(world_size)]
    assert run_on(world_size, own_number) == expected


@on_ranks(2, 3)
@pytest.mark.parametrize("scale", [1, 10])
def test_a_body_runs_on_every_rank_with_its_arguments(scale: int, tmp_path: Path) -> None:
    (tmp_path / f"rank{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()
    assert sum_of_ranks(scale) == scale * sum(range(dist.get_world_size()))


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), [(1, "one"), (2, "two")])
def test_a_body_may_take_its_world_size(world_size: int, name: str) -> None:
    assert dist.get_world_size() == world_size == {"one": 1, "two": 2}[name]


@on_ranks()
def body_that_fails(number: int) -> None:
    assert number + dist.get_rank() == 4


def test_a_failure_in_a_body_shows_the_body_alone() -> None:
    with pytest.raises(RankFailed) as caught:
        body_that_fails(number=4, world_size=2)  # type: ignore[call-arg]
    assert str(caught.value).startswith("rank 1 raised AssertionError: assert (4 + 1) == 4")
    assert "in body_that_fails" in caught.value.errors[1]
    assert "ranks.py" not in caught.value.errors[1].replace("test_ranks.py", "")


def test_warm_calls_reuse_the_ranks_and_cost_little() -> None:
    ready_pool(2).renew_groups()  # so that no call does
    before, processes = run_on(2, time.process_time), pool_processes()
    for _ in range(20):
        assert_works()
    assert pool_processes() == processes
    for start, end in zip(before, run_on(2, time.process_time), strict=True):
        assert end - start < 1.0, "seconds of processor time for 20 calls"


def test_each_call_starts_from_seed_zero() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    for tensor in run_on(2, random_tensor) + run_on(2, random_tensor):
        assert torch.equal(tensor, expected)


def test_an_assertion_in_a_rank_shows_its_values() -> None:
    before = run_on(2, own_number) and pool_processes()
    failure = failure_of(raise_on, 1)
    assert list(failure.errors) == [1]
    assert "AssertionError: assert 41 == (1 + 100)" in failure.errors[1]
    assert "in raise_on" in failure.errors[1]
    assert "rank_process.py" not in str(failure)
    assert str(failure).startswith("rank 1 raised AssertionError: assert 41")
    assert_works()
    assert pool_processes() == before, "every rank had answered: the pool is good"


def test_ranks_that_wait_for_one_that_raised_get_a_short_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    failure = failure_of(raise_before_collective, 0)
    assert str(failure).startswith("rank 0 raised ValueError: no cakes")
    assert "rank 0 is at work" in failure.errors[0]
    assert "gave no answer within 0.5 s of the first failure" in failure.errors[1]
    assert "in raise_before_collective" in failure.errors[1]
    assert_works()


def test_groups_left_uneven_do_not_spoil_the_next_call() -> None:
    failure_of(make_groups_on, 1)
    assert run_on(2, sum_in_new_group) == [2.0, 2.0]


def test_a_rank_that_exits_is_named() -> None:
    failure = failure_of(exit_on, 1)
    assert "exited with code 7" in failure.errors[1]
    assert "about to leave" in failure.errors[1]
    assert_works()


def test_a_rank_that_dies_with_its_socket_open_is_named() -> None:
    assert "exited with code 3" in failure_of(leave_a_child_and_exit_on, 1).errors[1]
    assert_works()


def test_a_rank_that_dies_between_calls_is_replaced() -> None:
    for rank in ready_pool(2).ranks:
        rank.process.kill()
        rank.process.join()
    assert_works()


def test_a_rank_that_is_killed_is_named() -> None:
    failure = failure_of(kill_on, 0)
    assert str(failure).startswith("rank 0 was killed by SIGKILL")
    assert_works()


def test_a_hang_shows_where_every_rank_stands() -> None:
    failure = failure_of(hang_on, 0, deadline=5.0)
    assert "gave no answer within 5 s of the call" in str(failure)
    assert "in sleep_in_a_named_place" in failure.errors[0]
    assert "in barrier" in failure.errors[1]
    assert_works()


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    assert "pickle" in failure_of(unpicklable).errors[0]
    assert_works()


def test_a_function_that_cannot_be_pickled_fails_at_the_call() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"[Pp]ickle"):
        run_on(2, lambda: None)
    assert_works()


def test_a_setting_of_torch_that_is_left_changed_is_named() -> None:
    try:
        with pytest.raises(RankFailed, match=r"left \{'threads': 2\} to the next calls"):
            run_on(1, torch.set_num_threads, 2)
    finally:
        ready_pool(1).kill()
