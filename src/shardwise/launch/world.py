"""The process group of a command, through which its ranks agree on errors and decisions."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.errors import ConfigError, PlanError
from shardwise.launch.environment import RankEnv
from shardwise.launch.rendezvous import fresh_store
from shardwise.local_devices import local_device

__all__ = ["CONFIG_EXIT_CODE", "World", "join_world"]

T = TypeVar("T")

CONFIG_EXIT_CODE = 2  # of a command that cannot run


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a command, as seen by one of them. Every rank must call its methods."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def check(self, validate: Callable[[], T]) -> T:
        """Call ``validate`` on every rank and return its result.

        On rank 0, raise a ConfigError with the ConfigErrors and PlanErrors of all ranks; on the
        others, SystemExit with code 2.
        """
        results: list[T] = []
        problem = ""
        try:
            results.append(validate())
        except (ConfigError, PlanError) as error:
            problem = str(error)
        problems = self.gather(problem)
        if any(problems):
            self._reject(_merge(problems))
        return results[0]

    def on_first(self, decide: Callable[[], T]) -> T:
        """Return the result of ``decide`` of rank 0, or raise its ConfigError, on every rank."""
        message: list[Any] = [None, ""]  # the result and the problem
        if self.is_first:
            try:
                message[0] = decide()
            except ConfigError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message)
        result, problem = message
        if problem:
            self._reject(problem)
        return cast("T", result)

    def _reject(self, problem: str) -> NoReturn:
        """Raise ``problem`` on rank 0 only, so that it is printed once."""
        if self.is_first:
            raise ConfigError(problem)
        raise SystemExit(CONFIG_EXIT_CODE)


@contextmanager
def join_world(env: RankEnv) -> Iterator[World]:
    """Initialize the default process group: NCCL between GPUs, Gloo between CPUs.

    The group is destroyed at the end of the block, but not after an error, because this would wait
    for ranks that may no longer run. A ConfigError or a SystemExit is raised on all ranks, so they
    destroy the group: one that still exists when the interpreter exits can abort it (SIGABRT).
    """
    _share_cores(env)
    os.environ.setdefault("LOCAL_RANK", str(env.local_rank))  # SLURM uses another name
    if env.master is not None:
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), env.master, strict=True):
            os.environ.setdefault(name, value)
    device = local_device()
    store, _, _ = next(rendezvous("env://", env.rank, env.world_size))
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=fresh_store(store, env.rank, env.world_size),
        rank=env.rank,
        world_size=env.world_size,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield World(env.rank, env.world_size, device)
    except (ConfigError, SystemExit):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _merge(problems: list[str]) -> str:
    """One message with each problem once, and its ranks unless all ranks have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        ranks.setdefault(problem, []).append(rank)
    if len(ranks) == 1:
        return problems[0]
    ranks.pop("", None)
    return "; ".join(
        f"rank {', '.join(map(str, affected))}: {problem}" for problem, affected in ranks.items()
    )


def _share_cores(env: RankEnv) -> None:
    """Divide the cores among the local ranks, unless OMP_NUM_THREADS is set."""
    if env.local_world_size and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // env.local_world_size))
