"""Steps of several engines in turns, on the ranks of one process group.

In each round every engine makes one step on the same batch, in an order that rotates, so that what
disturbs the machine disturbs all of them. The first rounds warm up and are thrown away.
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
from shardwise.bench.progress import show_progress
from shardwise.bench.setting import Setting
from shardwise.bench.work import Trainee, Work, gpt_work, tiny_work
from shardwise.launch.world import World
from shardwise.runtime.ledger import Ledger
from shardwise.schedule.events import EventKind

__all__ = ["NUM_WARM_UP", "Communication", "RankRound", "Turn", "run_heat", "run_tiny_heat"]

NUM_WARM_UP = 2
_WAITS = (EventKind.WAIT, EventKind.FINISH_REDUCE)


@dataclass(frozen=True, slots=True)
class Communication:
    """Of one step on one rank, in seconds."""

    busy: float  # that gathers and reductions ran
    exposed: float  # that the host waited for them


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one engine on one rank."""

    seconds: float  # from a barrier before it to a barrier after it
    cpu_seconds: float  # of all threads of the process
    page_faults: int
    loss: float
    communication: Communication | None  # None where the engine does not say


@dataclass(frozen=True, slots=True)
class RankRound:
    """A turn of each engine, as one rank saw it."""

    began: Clock
    ended: Clock
    reference_seconds: float
    load: float  # processes that wanted to run, over the last minute
    turns: dict[str, Turn]


def run_heat(ranks: World, setting: Setting, names: Sequence[str], title: str) -> list[RankRound]:
    """Rounds of these engines on the model of ``setting``; what each rank is started with."""
    return _run_rounds(ranks, gpt_work(setting), names, setting.rounds, title)


def run_tiny_heat(
    ranks: World, setting: Setting, names: Sequence[str], title: str
) -> list[RankRound]:
    """As `run_heat`, on a model of many tiny units."""
    return _run_rounds(ranks, tiny_work(setting), names, setting.rounds, title)


def _run_rounds(
    ranks: World, work: Work, names: Sequence[str], rounds: int, title: str
) -> list[RankRound]:
    taken: list[RankRound] = []
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
                taken.append(RankRound(began, Clock.read(), reference, load, turns))
    dist.barrier()
    return taken


def _take_turn(trainee: Trainee, batch: Tensor) -> Turn:
    dist.barrier()
    faults = _page_faults()
    began, cpu_began = time.perf_counter(), time.process_time()
    loss = trainee.step(batch)
    dist.barrier()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Turn(seconds, cpu_seconds, _page_faults() - faults, loss, _told_by(trainee.model))


def _told_by(model: nn.Module) -> Communication | None:
    if not isinstance(model, sw.FSDPModule):
        return None
    return _communication(sw.ledger(model))


def _communication(ledger: Ledger) -> Communication:
    """Of the last step."""
    records = ledger.records()
    return Communication(
        busy=sum(record.busy_seconds for record in records),
        exposed=sum(r.ended - r.began for r in records if r.event.kind in _WAITS),
    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
