"""The process group of a command, through which its ranks agree on errors and decisions."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwise.comm.device import local_device
from shardwise.errors import ConfigError, PlanError
from shardwise.launch.environment import RankEnv

__all__ = ["World", "fresh_store", "join_world"]

T = TypeVar("T")

CONFIG_EXIT_CODE = 2


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
        """Call ``decide`` on rank 0 and return its result on every rank; errors as in `check`."""
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


POLL_SECONDS = 0.01


def fresh_store(store: Store, rank: int, world_size: int, timeout_seconds: float = 600.0) -> Store:
    """Agree with all ranks of this attempt on a new prefix, which hides keys of earlier ones.

    torchrun keeps one store for all restarts of a job, and the ranks of the last attempt left their
    addresses in it. A rank that reads these addresses waits for a process that no longer exists
    (with Gloo, both ranks of a restart waited minutes to connect). The restart count cannot serve
    as a prefix, because it does not count restarts that follow a change of membership.

    Each rank publishes a token of its own. Rank 0 answers every token that it finds, including
    those of earlier attempts, until all ranks have acknowledged the prefix. A TimeoutError names
    the ranks that did not.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"shardwise/token/{rank}", token)
        prefix = store.get(f"shardwise/answer/{token}").decode()
        store.set(f"shardwise/joined/{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(1, world_size))
    while missing:
        for other in missing:
            if store.check([f"shardwise/token/{other}"]):
                token = store.get(f"shardwise/token/{other}").decode()
                store.set(f"shardwise/answer/{token}", prefix)
        missing = {
            other for other in missing if not store.check([f"shardwise/joined/{prefix}/{other}"])
        }
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not join in {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS if missing else 0)
    return PrefixStore(prefix, store)
