"""Each engine trains the same model to the same losses; what it moves is what it must."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.bench.engines import ENGINES, choose_engines
from shardwise.bench.inspection import inspect_engine
from shardwise.bench.options import SIZES, BenchOptions, Setting, read_shape
from shardwise.bench.rounds import run_heat, run_tiny_heat
from shardwise.bench.traffic import watch_traffic
from shardwise.bench.work import gpt_work
from shardwise.launch.world import World
from shardwise.train.model import GPT, Shape
from tests.ranks import run_on

SHAPE = Shape(vocabulary=64, context=8, width=16, layers=2, heads=2)
PARAMETERS = 64 * 16 + 16 + 2 * (12 * 16 * 16 + 2 * 16)
HERE = [n for n in ENGINES if n not in {"deepspeed", "alone", "alone-bf16"}]
SOURCE = Path(sw.__file__).parent
PEERS = {
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.nn.parallel.DistributedDataParallel",
    "deepspeed",
}


def setting(ranks: int, dtype: str = "fp32") -> Setting:
    return Setting("tiny", SHAPE, ranks, dtype, tuple(HERE), rounds=2, batch=2)


def this_rank() -> World:
    dist = torch.distributed
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def losses_of(dtype: str, names: list[str]) -> dict[str, list[float]]:
    ranks = this_rank()
    rounds = run_heat(ranks, setting(ranks.size, dtype), names, "rounds")
    assert all(turn.seconds > 0 for one in rounds for turn in one.turns.values())
    return {name: [one.turns[name].loss for one in rounds] for name in names}


def losses_alone(dtype: str) -> list[float]:
    """Of rank 0 by itself: to see that its losses tell whether gradients were averaged."""
    work = gpt_work(setting(2, dtype))
    trainee = ENGINES["alone"].start(work)
    return [trainee.step(work.batch(turn, 0)) for turn in range(4)][2:]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-3)])
def test_all_engines_train_alike(dtype: str, tolerance: float) -> None:
    names = [name for name in HERE if ENGINES[name].suits(2)]
    assert {"fsdp2-async", "zero-optimizer", "shardwise-fsdp-transaction"} <= set(names)
    of_first = run_on(2, losses_of, dtype, names, deadline=60.0)[0]
    for name, losses in of_first.items():
        assert losses == pytest.approx(of_first["ddp"], abs=tolerance), name
    if dtype == "fp32":
        assert losses_alone(dtype) != pytest.approx(of_first["ddp"], abs=tolerance)


def test_two_level_strategies_on_four_ranks() -> None:
    names = ["ddp", "shardwise-hsdp", "shardwise-hfsdp"]
    of_first = run_on(4, losses_of, "fp32", names, deadline=60.0)[0]
    for losses in of_first.values():
        assert losses == pytest.approx(of_first["ddp"], abs=1e-6)


def inspect(names: list[str]) -> dict[str, tuple[int, int, int, int]]:
    ranks = this_rank()
    several = {name: inspect_engine(ranks, setting(ranks.size), name) for name in names}
    return {
        name: (
            one.traffic.copied_bytes,
            one.traffic.num_collectives,
            one.traffic.sent_bytes,
            one.live_peak,
        )
        for name, one in several.items()
    }


def test_traffic_by_hand() -> None:
    names = ["alone", "ddp", "fsdp2", "fsdp2-no-reshard", "shardwise-fsdp"]
    seen = run_on(2, inspect, names, deadline=60.0)[0]
    copied, collectives, sent, live = (
        {name: seen[name][field] for name in names} for field in range(4)
    )
    whole, blocks = 4 * PARAMETERS, 4 * 2 * (12 * 16 * 16 + 2 * 16)
    assert (collectives["alone"], sent["alone"]) == (0, 0)
    # Every gradient goes into a bucket once; an all-reduce on two ranks sends all of it.
    assert copied["ddp"] - copied["alone"] == whole
    assert (collectives["ddp"], sent["ddp"]) == (1, whole)
    # Gathers in forward, those of blocks in backward again, reductions: half of each is sent.
    assert collectives["fsdp2"] == 3 + 2 + 3
    assert sent["fsdp2"] == whole + blocks // 2
    assert collectives["fsdp2-no-reshard"] == 3 + 3
    assert sent["fsdp2-no-reshard"] == whole
    # The last block is not freed before its backward here; and the ranks tell each other which
    # parameters they used, a byte each. Gradients are written once on their way, gathers copy the
    # own half, on threads of the engine's, which must be seen.
    assert collectives["shardwise-fsdp"] == 3 + 1 + 3 + 1
    assert sent["shardwise-fsdp"] == pytest.approx(whole + blocks // 4, abs=64)
    own = copied["shardwise-fsdp"] - copied["alone"]
    assert own == pytest.approx(whole + whole // 2 + blocks // 4, abs=64)
    assert copied["fsdp2"] > copied["shardwise-fsdp"]
    # Parameters, gradients and two states of everything, which DDP keeps in its buckets. Something
    # small that was there before may have been freed meanwhile.
    assert min(live["alone"], live["ddp"]) > 4 * whole - 4096


def count_lane_copies() -> int:
    model = sw.fully_shard(nn.Linear(64, 64, bias=False))
    with watch_traffic(model) as traffic, torch.no_grad():
        model(torch.ones(1, 64))
    return traffic.copied_bytes


def test_copies_on_the_engines_own_threads_are_seen() -> None:
    assert run_on(2, count_lane_copies) == [64 * 64 * 4 // 2] * 2


def tiny_turns() -> list[float]:
    ranks = this_rank()
    names = ["ddp", "shardwise-fsdp"]
    rounds = run_tiny_heat(ranks, setting(ranks.size), names, "rounds")
    return [one.turns["shardwise-fsdp"].seconds for one in rounds]


def test_tiny_units_run() -> None:
    assert all(seconds > 0 for seconds in run_on(2, tiny_turns, deadline=60.0)[0])


def test_rows_of_a_request() -> None:
    asked = BenchOptions(vs=("fsdp1",), ours=("fsdp",))
    assert choose_engines(asked) == ("ddp", "fsdp1", "fsdp1-orig", "shardwise-fsdp")
    assert "shardwise-hsdp" in choose_engines(BenchOptions(ranks=4))
    assert "shardwise-hsdp" not in choose_engines(BenchOptions(ranks=2))
    assert "shardwise-fsdp-transaction" not in choose_engines(BenchOptions())


@pytest.mark.parametrize(("size", "millions"), [("10M", 10), ("50M", 50), ("125M", 125)])
def test_sizes_are_what_they_say(size: str, millions: int) -> None:
    with torch.device("meta"):
        model = GPT(read_shape(size.lower(), sequence=16))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.02)
    assert model.shape.context == 16
    assert size in SIZES


def test_engines_of_peers_are_imported_by_the_harness_only() -> None:
    importers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if imported_by(path) & PEERS
    }
    assert importers == {"bench/baselines.py"}


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return modules | {
        f"{n.module}.{alias.name}"
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module
        for alias in n.names
    }
