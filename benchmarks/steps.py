"""Steps of several engines in turns, in one group of local CPU ranks."""

import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from benchmarks.engines import ENGINES
from shardwise.train.models import GPT, Shape

__all__ = ["Setting", "run_rank"]

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    ranks: int
    rounds: int
    width: int
    layers: int
    context: int
    batch: int  # sequences of a rank
    engines: tuple[str, ...]
    port: int = 29555


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one engine on one rank."""

    seconds: float
    cpu_seconds: float
    page_faults: int


class Runner:
    """A model in the hands of one engine."""

    def __init__(self, name: str, setting: Setting) -> None:
        torch.manual_seed(0)
        shape = Shape(VOCABULARY, setting.context, setting.width, setting.layers, heads=4)
        self.model = ENGINES[name](GPT(shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.around: Callable[[], AbstractContextManager[None]] = (
            partial(sw.transaction, self.model, self.optimizer)
            if name.endswith("-transaction")
            else nullcontext
        )

    def step(self, tokens: Tensor) -> Turn:
        dist.barrier()
        faults = _page_faults()
        began, cpu_began = time.perf_counter(), time.process_time()
        with self.around():
            logits = self.model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return Turn(
            time.perf_counter() - began, time.process_time() - cpu_began, _page_faults() - faults
        )


def run_rank(rank: int, setting: Setting, out: Path | None) -> None:
    """One rank's part of the run; rank 0 reports."""
    torch.set_num_threads(max(1, (torch.get_num_threads() or 1) // setting.ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{setting.port}",
        rank=rank,
        world_size=setting.ranks,
    )
    runners = {name: Runner(name, setting) for name in setting.engines}
    turns = take_turns(runners, setting)
    if rank == 0:
        overlaps = {name: _overlapped_share(runner.model) for name, runner in runners.items()}
        report(setting, turns, overlaps, out)
    dist.barrier()
    dist.destroy_process_group()


def take_turns(runners: dict[str, Runner], setting: Setting) -> dict[str, list[Turn]]:
    """Step every engine once a round, in an order that rotates; the first two rounds warm up."""
    turns: dict[str, list[Turn]] = defaultdict(list)
    names = list(runners)
    for round_ in range(setting.rounds + 2):
        start = round_ % len(names)
        for name in (*names[start:], *names[:start]):
            shape = (setting.batch, setting.context + 1)
            turn = runners[name].step(torch.randint(0, VOCABULARY, shape))
            if round_ > 1:
                turns[name].append(turn)
    return turns


def report(
    setting: Setting,
    turns: dict[str, list[Turn]],
    overlaps: dict[str, float | None],
    out: Path | None,
) -> None:
    """Print ratios of medians to the first engine's, and write the figures where asked."""
    base = setting.engines[0]
    table = Table("engine", title=f"a step relative to {base}, {setting.ranks} CPU ranks")
    for heading in ("time", "CPU time", "page faults", "gathers overlapped"):
        table.add_column(heading, justify="right")
    figures = {}
    for name in setting.engines:
        taken = turns[name]
        seconds = _median(taken, "seconds") / _median(turns[base], "seconds")
        cpu = _median(taken, "cpu_seconds") / _median(turns[base], "cpu_seconds")
        faults = int(_median(taken, "page_faults"))
        share = overlaps[name]
        shown = "" if share is None else f"{share:.0%}"
        table.add_row(name, f"{seconds:.2f}", f"{cpu:.2f}", f"{faults:,}", shown)
        figures[name] = {"time": seconds, "cpu": cpu, "faults": faults, "overlapped": share}
    Console().print(table)
    if out is not None:
        text = json.dumps({"setting": asdict(setting), "relative_to": base, "engines": figures})
        out.write_text(text + "\n", encoding="utf-8")


def _median(turns: Sequence[Turn], field: str) -> float:
    return statistics.median(getattr(turn, field) for turn in turns)


def _overlapped_share(model: nn.Module) -> float | None:
    return sw.ledger(model).overlapped_share() if isinstance(model, sw.FSDPModule) else None


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
