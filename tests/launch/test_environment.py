"""The environment variables of launchers."""

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.environment import RankEnv, read_rank_env

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_no_rank() -> None:
    assert (
        read_rank_env({"HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}) is None
    )


def test_torchrun() -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_env(ranks | MEETING) == RankEnv(3, 4, local_rank=1, local_world_size=2)


def test_rank_and_world_size_are_enough() -> None:
    env = read_rank_env({"RANK": "1", "WORLD_SIZE": "2"} | MEETING)
    assert env == RankEnv(1, 2, local_rank=0, local_world_size=0)


def test_slurm() -> None:
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    assert read_rank_env(step | MEETING) == RankEnv(5, 8, local_rank=1, local_world_size=0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu-[04-07,9],cpu1", "gpu-04"),
        ("rack[1,3]-ib,x[2-3]", "rack1-ib"),
        ("a,b[1-2]", "a"),
        ("127.0.0.[2-3]", "127.0.0.2"),
    ],
)
def test_slurm_implies_where_rank_0_listens(nodes: str, first: str) -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "123456"}
    env = read_rank_env(step | {"SLURM_STEP_NODELIST": nodes})
    assert env is not None
    assert env.master == (first, "23456")


def test_torchrun_inside_a_slurm_step_takes_precedence() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    env = read_rank_env(step | {"RANK": "9", "WORLD_SIZE": "16"} | MEETING)
    assert env is not None
    assert (env.rank, env.world_size) == (9, 16)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "expected both RANK and WORLD_SIZE, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "but RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "set MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING, "expected a number from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"} | MEETING, "RANK=-1"),
        ({"RANK": "one", "WORLD_SIZE": "2"} | MEETING, "RANK='one': expected an integer"),
    ],
)
def test_missing_or_invalid_variables_are_errors(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rank_env(environment)


def test_nproc_must_not_contradict_the_launcher() -> None:
    env = RankEnv(1, 3, local_rank=1, local_world_size=3)
    env.check_nproc(None)
    env.check_nproc(3)
    with pytest.raises(ConfigError, match="--nproc 2: this process is one of 3 ranks"):
        env.check_nproc(2)
