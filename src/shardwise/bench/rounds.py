"""Rounds: every engine makes one step on the same batch, in an order that rotates.

So a disturbance of the machine reaches all engines. The first rounds warm up and are discarded.
Engines whose models do not fit into memory together run in several heats.
"""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.bench.engines import ENGINES
from shardwise.bench.machine import Clock, reference_seconds
from shardwise.bench.options import Setting
from shardwise.bench.progress import show_progress
from shardwise.bench.work import Trainee, Work, gpt_work, tiny_work
from shardwise.launch.world import World
from shardwise.schedule.events import EventKind

__all__ = [
    "NUM_WARM_UP",
    "Communication",
    "RankRound",
    "Turn",
    "plan_heats",
    "run_heat",
    "run_tiny_heat",
]

NUM_WARM_UP = 2
_WAITS = (EventKind.WAIT, EventKind.FINISH_REDUCE)
# Bytes per parameter: itself, its gradient and AdamW's two states; a sharded engine also keeps some
# gathered units, or memory that is freed but not returned to the system.
WHOLE, FOR_GATHERED = 16, 4
SHARE_OF_MEMORY = 0.6  # the rest is for activations and other processes


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds of communication in one step on one rank."""

    busy: float  # while gathers and reductions ran
    exposed: float  # while the host waited for them


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one engine on one rank."""

    seconds: float  # from a barrier before it to a barrier after it
    cpu_seconds: float  # of all threads of the process
    page_faults: int
    loss: float
    communication: Communication | None  # None for engines that do not record it


@dataclass(frozen=True, slots=True)
class RankRound:
    """A turn of each engine on one rank."""

    began: Clock
    ended: Clock
    reference_seconds: float
    load: float  # runnable processes, averaged over the last minute
    turns: dict[str, Turn]


def plan_heats(setting: Setting, num_parameters: int, available_bytes: int) -> list[list[str]]:
    """Groups of engines that share processes; each starts with the base.

    Args:
        setting: its engines, the base first.
        num_parameters: of the model.
        available_bytes: of the machine; 0 means unknown, and puts all engines into one heat.
    """
    base, *others = setting.engines
    limit = int(SHARE_OF_MEMORY * available_bytes)
    heats: list[list[str]] = [[base]]
    for name in others:
        needed = _heat_bytes([*heats[-1], name], setting.ranks, num_parameters)
        if available_bytes and needed > limit and len(heats[-1]) > 1:
            heats.append([base])
        heats[-1].append(name)
    return heats


def run_heat(ranks: World, setting: Setting, names: Sequence[str], title: str) -> list[RankRound]:
    """Run rounds of these engines on the model of ``setting``; called on every rank."""
    return _run_rounds(ranks, gpt_work(setting), names, setting.rounds, title)


def run_tiny_heat(
    ranks: World, setting: Setting, names: Sequence[str], title: str
) -> list[RankRound]:
    """As `run_heat`, on a model of many tiny units."""
    return _run_rounds(ranks, tiny_work(setting), names, setting.rounds, title)


def _heat_bytes(names: Sequence[str], ranks: int, num_parameters: int) -> int:
    per_rank = (
        WHOLE if ENGINES[name].keeps_whole else WHOLE // ranks + FOR_GATHERED for name in names
    )
    return sum(per_rank) * num_parameters * ranks


def _run_rounds(
    ranks: World, work: Work, names: Sequence[str], rounds: int, title: str
) -> list[RankRound]:
    measured: list[RankRound] = []
    with show_progress(title, NUM_WARM_UP + rounds, visible=ranks.is_first) as advance:
        trainees = {name: ENGINES[name].start(work) for name in names}
        for number in range(-NUM_WARM_UP, rounds):
            advance("begin" if number == -NUM_WARM_UP else "")
            start = number % len(names)
            order = (*names[start:], *names[:start])
            batch = work.batch(number + NUM_WARM_UP, ranks.rank)
            reference, began = reference_seconds(), Clock.read()
            turns = {name: _take_turn(trainees[name], batch) for name in order}
            if number >= 0:
                load = os.getloadavg()[0]
                measured.append(RankRound(began, Clock.read(), reference, load, turns))
    dist.barrier()
    return measured


def _take_turn(trainee: Trainee, batch: Tensor) -> Turn:
    dist.barrier()
    faults = _page_faults()
    began, cpu_began = time.perf_counter(), time.process_time()
    loss = trainee.step(batch)
    dist.barrier()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    communication = _communication(trainee.model)
    return Turn(seconds, cpu_seconds, _page_faults() - faults, loss, communication)


def _communication(model: nn.Module) -> Communication | None:
    """Of the last step, from the ledger."""
    if not isinstance(model, sw.FSDPModule):
        return None
    records = sw.ledger(model).records()
    return Communication(
        busy=sum(record.busy_seconds for record in records),
        exposed=sum(r.ended - r.began for r in records if r.event.kind in _WAITS),
    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
