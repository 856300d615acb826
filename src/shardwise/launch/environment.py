"""The rank of this process, from the environment variables that a launcher sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError

__all__ = ["RankEnv", "read_rank_env"]


@dataclass(frozen=True, slots=True)
class RankEnv:
    rank: int
    world_size: int
    local_rank: int  # rank on this machine
    local_world_size: int  # number of ranks on this machine; 0 if the launcher does not set it
    # Host and port of rank 0, if the launcher implies them but does not set MASTER_ADDR and
    # MASTER_PORT.
    master: tuple[str, str] | None = None

    def check_nproc(self, nproc: int | None) -> None:
        """Raise a ConfigError if ``--nproc`` contradicts the launcher."""
        if nproc not in (None, self.world_size):
            raise ConfigError(
                f"--nproc {nproc}: this process is one of {self.world_size} ranks that a launcher "
                "started; omit --nproc"
            )


# The variables of `_read`, with the names of torchrun and most other launchers, and those of SLURM.
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def read_rank_env(environment: Mapping[str, str]) -> RankEnv | None:
    """Read RANK and WORLD_SIZE, or the variables of a SLURM step with several tasks.

    None if no launcher started this process; a ConfigError if a variable is missing or invalid.
    """
    if {"RANK", "WORLD_SIZE"} & set(environment):
        env = _read(environment, *_TORCH)
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        env = replace(_read(environment, *_SLURM), master=_slurm_master(environment))
    else:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing and env.master is None:
        raise ConfigError(
            f"rank {env.rank} of {env.world_size} cannot find the other ranks: set "
            f"{' and '.join(missing)} (the host of rank 0 and a free port there), or launch with "
            "torchrun"
        )
    return env


def _read(environment: Mapping[str, str], *names: str) -> RankEnv:
    missing = [name for name in names[:2] if name not in environment]
    if missing:
        raise ConfigError(f"expected both {names[0]} and {names[1]}, but {missing[0]} is not set")
    rank, world_size, local_rank, local_size = (_read_int(environment, name) for name in names)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{names[0]}={rank}: expected a number from 0 to {names[1]} - 1 = {world_size - 1}"
        )
    return RankEnv(rank, world_size, local_rank, local_size)


def _slurm_master(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The first host of a step (``gpu-04`` of ``gpu-[04-07,9]``), and a port from the job id."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    job = environment.get("SLURM_JOB_ID", "")
    if first is None or not job.isdecimal():
        return None
    return "".join(part or "" for part in first.groups()), str(20000 + int(job) % 20000)


def _read_int(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, 0))
    except ValueError:
        raise ConfigError(f"{name}={environment[name]!r}: expected an integer") from None
