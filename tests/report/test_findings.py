"""Each finding is tested on a run with a planted fault and on the same run without it.

Compute and collectives are sleeps, so that times depend on the schedule and not on the load of the
machine.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.api import CollectiveId
from shardwise.features.host_collectives import HostCollectives
from shardwise.recording.format import RankRecording, read_recording
from shardwise.report.findings import Finding, find
from shardwise.report.measured import measure
from tests.ranks import run_on
from tests.report.synthetic import Run, record_run

STEPS = 4
SMALL, LARGE = 8, 512  # widths of blocks of 256 bytes, and of 1 MiB
TOLERANCE = 0.25  # relative to the measured saving
TRIALS = 6  # because other load can slow down one of the two runs


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call]
        return y


Cost = Callable[[CollectiveId], float]


@contextmanager
def slow_network(cost: Cost) -> Iterator[None]:
    """Delay every collective by ``cost`` seconds."""
    begin = HostCollectives._begin

    def late(self: HostCollectives, collective: CollectiveId) -> None:
        begin(self, collective)
        time.sleep(cost(collective))

    with mock.patch.object(HostCollectives, "_begin", late):
        yield


def train(directory: str, run: Callable[[], tuple[nn.Module, Cost]]) -> None:
    """Record a few steps of a model on this rank."""
    torch.manual_seed(0)
    model, cost = run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slow_network(cost), sw.record(model, directory, steps=range(1, 99)):
        for _ in range(STEPS):
            width = SMALL if isinstance(model, nn.Sequential) and len(model) > 4 else LARGE
            model(torch.randn(2, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def blocks(width: int, number: int = 4, seconds: float = 0.02) -> nn.Sequential:
    return nn.Sequential(*(Block(width, seconds) for _ in range(number)))


def latency(seconds: float) -> Cost:
    return lambda _collective: seconds


def by_size(seconds: float) -> Cost:
    """Cost in proportion to size: ``seconds`` for a large block on two ranks."""
    return lambda collective: seconds * collective.slot_bytes / (LARGE * LARGE * 2)


def prefetch(number: int) -> tuple[nn.Module, Cost]:
    return sw.fully_shard(blocks(LARGE), units=Block, prefetch=number), latency(0.02)


def slow_rank(factor: float) -> tuple[nn.Module, Cost]:
    seconds = 0.02 * (factor if dist.get_rank() == 1 else 1.0)
    return sw.fully_shard(blocks(LARGE, seconds=seconds), units=Block), latency(0.001)


def small_units(units: Any) -> tuple[nn.Module, Cost]:
    return sw.fully_shard(blocks(SMALL, 6, 0.002), units=units), latency(0.02)


def one_unit(units: Any) -> tuple[nn.Module, Cost]:
    return sw.fully_shard(blocks(LARGE), units=units), by_size(0.02)


def unbalanced(granularity: Any) -> tuple[nn.Module, Cost]:
    model = sw.fully_shard(blocks(LARGE, seconds=0.002), units=Block, granularity=granularity)
    return model, by_size(0.02)


def slow_collective(seconds: float) -> tuple[nn.Module, Cost]:
    model = sw.fully_shard(blocks(LARGE), units=Block)
    return model, lambda one: seconds if one.label == "gather 2" else 0.005


# Case -> (function, its argument with the fault, its argument without it).
CASES: dict[str, tuple[Callable[[Any], tuple[nn.Module, Cost]], Any, Any]] = {
    "prefetch": (prefetch, 0, 1),
    "slow rank": (slow_rank, 2.0, 1.0),
    "small units": (small_units, Block, None),
    "one unit": (one_unit, None, "auto"),
    "unbalanced": (unbalanced, "tensor", "element"),
    "slow collective": (slow_collective, 0.1, 0.005),
}


def train_both(directory: str, case: str) -> None:
    make, faulty, fixed = CASES[case]
    train(f"{directory}/faulty", lambda: make(faulty))
    train(f"{directory}/fixed", lambda: make(fixed))


def findings_of(tmp_path: Path, case: str) -> tuple[list[Finding], float]:
    """Return the findings of the faulty run, and the seconds that the fix saves per update."""
    run_on(2, train_both, str(tmp_path), case)
    faulty, fixed = (read_recording(tmp_path / name) for name in ("faulty", "fixed"))
    saved = measure(faulty).update_seconds - measure(fixed).update_seconds
    return find(faulty), saved


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (Run(prefetch=0), "raise prefetch from 0 to 1"),
        (Run(slowness={1: 2.0}), "Rank 1 computes"),
    ],
    ids=["prefetch", "slow rank"],
)
def test_the_cause_in_a_simulated_run_comes_first_and_its_saving_is_true(
    faulty: Run, words: str
) -> None:
    found = find(record_run(faulty))
    seconds = [measure(record_run(run)).update_seconds for run in (faulty, Run())]
    assert words in found[0].title
    assert found[0].saves_seconds == pytest.approx(seconds[0] - seconds[1], rel=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("prefetch", "raise prefetch from 0 to 1"),
        ("slow rank", "Rank 1 computes"),
        ("small units", "6 units have less than"),
        ("one unit", "is 100% of all that is gathered"),
        ("unbalanced", "is padding"),
        ("slow collective", "The gather of 2 takes"),
    ],
)
def test_the_cause_comes_first_and_its_saving_is_true(
    tmp_path: Path, case: str, words: str
) -> None:
    trials = []
    for trial in range(TRIALS):
        found, saved = findings_of(tmp_path / str(trial), case)
        trials.append((saved, found[:2]))
        is_cause = bool(found) and words in found[0].title
        if is_cause and found[0].saves_seconds == pytest.approx(saved, rel=TOLERANCE):
            return
    pytest.fail(f"in none of the trials: {trials}")


def titles(ranks: Sequence[RankRecording]) -> list[str]:
    return [one.title for one in find(ranks)]


def test_a_run_without_faults_has_no_costly_finding() -> None:
    ranks = record_run(Run(num_blocks=12))
    seconds = measure(ranks).update_seconds
    assert all(one.saves_seconds < 0.1 * seconds for one in find(ranks))


def test_a_change_without_a_cost_in_memory_says_so() -> None:
    """With prefetch, both blocks are gathered at once, as they are if they are merged."""
    found = titles(record_run(Run(num_blocks=2, block_elements=100)))
    (title,) = (one for one in found if "merge" in one)
    assert title.endswith("merge them (with the same memory)")


def test_micro_batches_that_reduce_each_time_are_found() -> None:
    ranks = [
        replace(rank, steps=tuple(replace(s, updates=s.step // 2) for s in rank.steps))
        for rank in record_run(Run(num_steps=6))
    ]
    assert measure(ranks).num_passes == 2
    found = next(one for one in find(ranks) if "micro-batches" in one.title)
    assert found.title.startswith("2 micro-batches reduce gradients 2 times: hold them until")
    assert found.saves_bytes == -sum(unit.gradient_bytes for unit in ranks[0].header.units)


def test_a_second_backward_of_a_retained_graph_is_replayed() -> None:
    """Every other pass has no forward of its own, as with ``backward(retain_graph=True)``."""
    ranks = [
        replace(
            rank,
            steps=tuple(replace(s, updates=s.step // 2) for s in rank.steps),
            events=tuple(e for e in rank.events if e.event != "forward" or e.step % 2 == 0),
        )
        for rank in record_run(Run(num_steps=6))
    ]
    assert find(ranks)
    events = measure(ranks).replayed().events[0]
    reduced = [
        Counter(e.unit for e in events if e.event == "reduce" and e.step == n) for n in (0, 1)
    ]
    assert reduced[0] == reduced[1] == Counter(range(len(ranks[0].header.units)))


def test_a_rank_that_waits_for_its_data_is_named() -> None:
    ranks = list(record_run(Run(num_blocks=2)))
    spans = ranks[2].spans
    late = [replace(one, began=one.began - 0.01) if one.name == "data" else one for one in spans]
    ranks[2] = replace(ranks[2], spans=tuple(late))
    assert any(title.startswith("Rank 2 waits 10") for title in titles(ranks))


def test_padded_tokens_are_found() -> None:
    ranks = list(record_run(Run()))
    steps = tuple(replace(one, tokens=60, padded_tokens=40) for one in ranks[3].steps)
    ranks[3] = replace(ranks[3], steps=steps)
    assert "Rank 3 pads 40% of its tokens: pack sequences together" in titles(ranks)


def test_an_optimizer_that_loops_over_its_tensors_is_found() -> None:
    info = {"optimizer_way": "loop", "optimizer_tensors": 291}
    ranks = [replace(rank, header=replace(rank.header, info=info)) for rank in record_run(Run())]
    assert any("The optimizer loops over 291 tensors" in title for title in titles(ranks))
