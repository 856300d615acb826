"""Who this process is, as launchers tell it."""

import pytest

from shardwise.launch.errors import ConfigError
from shardwise.launch.ranks import Place, find_place

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_no_place() -> None:
    assert find_place({"HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_tells_the_place() -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_place(ranks | MEETING) == Place(3, 4, local_rank=1, num_local_ranks=2)


def test_rank_and_world_size_are_enough() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "2"} | MEETING)
    assert place == Place(1, 2, local_rank=0, num_local_ranks=0)


def test_a_slurm_step_tells_the_place() -> None:
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    assert find_place(step | MEETING) == Place(5, 8, local_rank=1, num_local_ranks=0)


def test_torchrun_inside_a_slurm_step_has_the_last_word() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    place = find_place(step | {"RANK": "9", "WORLD_SIZE": "16"} | MEETING)
    assert place is not None
    assert (place.rank, place.num_ranks) == (9, 16)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "expected both RANK and WORLD_SIZE, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "but RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "set MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING, "expected a number from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"} | MEETING, "RANK=-1"),
        ({"RANK": "one", "WORLD_SIZE": "2"} | MEETING, "RANK='one': expected a whole number"),
    ],
)
def test_half_a_place_is_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(environment)
