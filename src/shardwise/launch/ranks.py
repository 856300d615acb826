"""The processes of a run: who this one is, and what they tell each other."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.launch.errors import ConfigError
from shardwise.launch.rendezvous import own_store
from shardwise.transport.device import local_device

__all__ = ["Place", "Ranks", "find_place", "process_group"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that a launcher started."""

    rank: int
    num_ranks: int
    local_rank: int  # on this machine
    num_local_ranks: int  # on this machine; 0 where the launcher does not say


@dataclass(frozen=True, slots=True)
class Names:
    """The environment variables of a launcher."""

    rank: str
    num_ranks: str
    local_rank: str
    num_local_ranks: str


TORCH = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun, and most others
SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, seen from one of them; every rank makes the same calls."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return [value for value in values if value is not None]

    def agree(self, decide: Callable[[], T]) -> T:
        """What ``decide`` gives on the first rank; its ConfigError is raised on all of them."""
        decision: list[T | ConfigError | None] = [None]
        if self.is_first:
            try:
                decision = [decide()]
            except ConfigError as error:
                decision = [error]
        dist.broadcast_object_list(decision)
        [outcome] = decision
        if isinstance(outcome, ConfigError):
            raise outcome
        assert outcome is not None
        return outcome


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Read what ``torchrun`` and its like set (RANK, WORLD_SIZE), or a SLURM step of several tasks.

    Raises:
        ConfigError: half of it is set, or the address to meet at is missing.
    """
    if {TORCH.rank, TORCH.num_ranks} & set(environment):
        place = _read_place(environment, TORCH)
    elif environment.get(SLURM.num_ranks, "1") != "1":
        place = _read_place(environment, SLURM)
    else:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            f"this is rank {place.rank} of {place.num_ranks}, but the ranks cannot meet: set "
            f"{' and '.join(missing)} (the host and a free port of rank 0), or launch with torchrun"
        )
    return place


@contextmanager
def process_group(place: Place) -> Iterator[Ranks]:
    """Meet the other ranks: NCCL between GPUs, Gloo between CPUs.

    A run that fails leaves the group as it is: taking it down would wait for ranks that are gone.
    But a mistake in the configuration is one on all ranks, and so is a stop after a checkpoint; a
    group that is left to the end of Python can end it with SIGABRT.
    """
    device = local_device()
    store, _, _ = next(rendezvous("env://", place.rank, place.num_ranks))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=own_store(store, place.rank, place.num_ranks),
        rank=place.rank,
        world_size=place.num_ranks,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(place.rank, place.num_ranks, device)
    except (ConfigError, SystemExit):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _read_place(environment: Mapping[str, str], names: Names) -> Place:
    missing = [name for name in (names.rank, names.num_ranks) if name not in environment]
    if missing:
        raise ConfigError(
            f"expected both {names.rank} and {names.num_ranks}, but {missing[0]} is not set"
        )
    place = Place(
        rank=_read_number(environment, names.rank, default=0),
        num_ranks=_read_number(environment, names.num_ranks, default=1),
        local_rank=_read_number(environment, names.local_rank, default=0),
        num_local_ranks=_read_number(environment, names.num_local_ranks, default=0),
    )
    if not 0 <= place.rank < place.num_ranks:
        raise ConfigError(
            f"{names.rank}={place.rank}: expected a number from 0 to "
            f"{names.num_ranks} - 1 = {place.num_ranks - 1}"
        )
    return place


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environment.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={environment[name]!r}: expected a whole number") from None
