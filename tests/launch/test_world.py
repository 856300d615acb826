"""Errors and decisions that all ranks share."""

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, PlanError
from shardwise.launch.world import World
from tests.ranks import run_on


def world() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def validate(failing: dict[int, str]) -> str:
    """What a rank gets whose own validation fails if ``failing`` has its number."""
    this = world()

    def check() -> str:
        if this.rank in failing:
            raise (PlanError if this.rank == 1 else ConfigError)(failing[this.rank])
        return f"valid on rank {this.rank}"

    try:
        return this.check(check)
    except ConfigError as error:
        return str(error)
    except SystemExit as stop:
        return f"exit {stop.code}"


def test_every_rank_gets_its_own_result() -> None:
    assert run_on(2, validate, {}) == ["valid on rank 0", "valid on rank 1"]


def test_an_error_of_another_rank_is_raised_on_rank_0() -> None:
    assert run_on(2, validate, {1: "no such file"}) == ["rank 1: no such file", "exit 2"]


def test_an_error_of_all_ranks_is_reported_once() -> None:
    assert run_on(2, validate, {0: "no such key", 1: "no such key"}) == ["no such key", "exit 2"]


def test_different_errors_are_reported_together() -> None:
    expected = ["rank 0: no such key; rank 1: no such file", "exit 2"]
    assert run_on(2, validate, {0: "no such key", 1: "no such file"}) == expected


def decide(problem: str) -> object:
    this = world()

    def choose() -> int:
        assert this.is_first
        if problem:
            raise ConfigError(problem)
        return 7

    try:
        return this.on_first(choose)
    except ConfigError as error:
        return str(error)
    except SystemExit as stop:
        return stop.code


def test_rank_0_decides_for_all() -> None:
    assert run_on(2, decide, "") == [7, 7]
    assert run_on(2, decide, "not writable") == ["not writable", 2]
