"""All engines have the same losses, and their traffic is that calculated by hand."""

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise as sw
from shardwise.bench import measure
from shardwise.bench.engines import ENGINES, choose_engines
from shardwise.bench.harness import merge
from shardwise.bench.measure import inspect_engine, measure_steps
from shardwise.bench.memory import Peak
from shardwise.bench.options import SIZES, BenchOptions, Setting, read_shape
from shardwise.bench.traffic import watch_traffic
from shardwise.bench.work import gpt_work, tiny_work
from shardwise.blockwise import Blocks
from shardwise.errors import ConfigError
from shardwise.launch.world import World
from shardwise.train.model import GPT, gpt_shape
from tests.ranks import on_ranks
from tests.waiting import eventually

SHAPE = gpt_shape(vocabulary=64, context=8, width=16, layers=2, heads=2)
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
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


class PeakOfSteps(Peak):
    """Lets each optimizer step wait until memory was sampled, even on a busy machine."""

    def __init__(self, read: Callable[[], int], seconds: float) -> None:
        self.num_reads = 0
        super().__init__(partial(self.counted, read), seconds)

    def counted(self, read: Callable[[], int]) -> int:
        found = read()
        self.num_reads += 1
        return found

    def __enter__(self) -> "PeakOfSteps":
        self.hook = register_optimizer_step_pre_hook(self.wait_for_read)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        super().__exit__(*error)

    def wait_for_read(self, *_: object) -> None:
        before = self.num_reads
        assert eventually(lambda: self.num_reads > before + 1), "a sample may have begun before"


def losses_of(dtype: str, names: list[str]) -> dict[str, list[float]]:
    """Return the losses of each engine, averaged over ranks."""
    world = this_rank()
    rounds = measure_steps(world, setting(world.size, dtype), gpt_work, names, "steps")
    assert all(step["seconds"] > 0 for round_ in rounds for step in round_.cases.values())
    rounds = merge(world.gather(rounds))
    return {name: [round_.cases[name]["loss"] for round_ in rounds] for name in names}


ON_2_RANKS = [name for name in HERE if ENGINES[name].supports_ranks(2)]
BY_DEFAULT = [name for name in ON_2_RANKS if ENGINES[name].is_quick]


@on_ranks(2)
@pytest.mark.parametrize(
    ("names", "dtype", "tolerance"),
    [
        (BY_DEFAULT, "fp32", 1e-6),
        pytest.param(ON_2_RANKS, "fp32", 1e-6, marks=pytest.mark.thorough),
        pytest.param(ON_2_RANKS, "bf16", 2e-3, marks=pytest.mark.thorough),
    ],
    ids=["default", "all-fp32", "all-bf16"],
)
def test_engines_have_the_same_losses(names: list[str], dtype: str, tolerance: float) -> None:
    found = losses_of(dtype, [*names, "alone"])
    alone = found.pop("alone")
    for name, losses in found.items():
        if ENGINES[name].is_exact:
            assert losses == pytest.approx(found["ddp"], abs=tolerance), name
    if dtype == "fp32":  # so these losses show whether gradients were averaged
        assert alone != pytest.approx(found["ddp"], abs=tolerance)


@on_ranks(2)
def test_rows_that_round_or_update_otherwise() -> None:
    """Their losses are close to those of the base."""
    names = [name for name in ON_2_RANKS if not ENGINES[name].is_exact]
    kinds = ("wire", "muon", "adam8bit", "outer")
    assert names == [f"shardwise-fsdp-{kind}" for kind in kinds]
    found = losses_of("fp32", ["ddp", *names])
    base = found.pop("ddp")
    for name, losses in found.items():
        assert losses == pytest.approx(base, abs=2e-2), name
    assert found["shardwise-fsdp-wire"] != base


@pytest.mark.thorough  # tests/runtime/test_strategies.py covers the strategies
@on_ranks(4)
def test_two_level_strategies_have_the_same_losses() -> None:
    found = losses_of("fp32", ["ddp", "shardwise-hsdp", "shardwise-hfsdp"])
    for losses in found.values():
        assert losses == pytest.approx(found["ddp"], abs=1e-6)


@on_ranks(2)
def test_traffic_calculated_by_hand() -> None:
    names = ["alone", "ddp", "fsdp2", "fsdp2-no-reshard", "shardwise-fsdp"]
    with mock.patch.object(measure, "Peak", PeakOfSteps):
        found = {name: inspect_engine(this_rank(), setting(2), name) for name in names}
    copied, collectives, sent, live = (
        {name: figures[key] for name, figures in found.items()}
        for key in ("copied_bytes", "num_collectives", "sent_bytes", "live_peak")
    )
    whole, blocks = 4 * PARAMETERS, 4 * 2 * (12 * 16 * 16 + 2 * 16)
    assert (collectives["alone"], sent["alone"]) == (0, 0)
    # DDP copies every gradient into a bucket; an all-reduce on two ranks sends all of it.
    assert copied["ddp"] - copied["alone"] == whole
    assert (collectives["ddp"], sent["ddp"]) == (1, whole)
    # Gathers in forward, gathers of blocks in backward, reductions: half of each is sent.
    assert collectives["fsdp2"] == 3 + 2 + 3
    assert sent["fsdp2"] == whole + blocks // 2
    assert collectives["fsdp2-no-reshard"] == 3 + 3
    assert sent["fsdp2-no-reshard"] == whole
    # shardwise does not free the last block before its backward, and its ranks exchange which
    # parameters they used, a byte each. Each gradient is written once on its way to the reduction;
    # gathers copy a rank's own half, on threads of the engine.
    assert collectives["shardwise-fsdp"] == 3 + 1 + 3 + 1
    assert sent["shardwise-fsdp"] == pytest.approx(whole + blocks // 4, abs=64)
    own = copied["shardwise-fsdp"] - copied["alone"]
    assert own == pytest.approx(whole + whole // 2 + blocks // 4, abs=64)
    assert copied["fsdp2"] > copied["shardwise-fsdp"]
    # Parameters, gradients (which DDP keeps in its buckets) and two states. Something small that
    # was allocated before may have been freed meanwhile.
    assert min(live["alone"], live["ddp"]) > 4 * whole - 4096


@on_ranks(2)
def test_replicas_send_half_of_their_parameters_in_4_bits() -> None:
    """The row synchronizes one of two fragments in each step: a block, alone or with the root."""
    found = inspect_engine(this_rank(), setting(2), "shardwise-fsdp-outer")
    assert found["sent_bytes"] == found["outer_bytes"]  # each of two ranks is a replica
    block = 12 * 16 * 16 + 2 * 16
    sizes = block, PARAMETERS - block
    assert found["outer_bytes"] in {Blocks("int4", 128).num_bytes(size) for size in sizes}
    assert inspect_engine(this_rank(), setting(2), "shardwise-fsdp")["outer_bytes"] == 0


@on_ranks(2)
def test_copies_on_the_threads_of_the_engine_count() -> None:
    model = sw.fully_shard(nn.Linear(64, 64, bias=False))
    with watch_traffic(model) as traffic, torch.no_grad():
        model(torch.ones(1, 64))
    assert traffic.copied_bytes == 64 * 64 * 4 // 2


@pytest.mark.thorough  # tests/cli/test_bench.py runs it as well
@on_ranks(2)
def test_tiny_units_train() -> None:
    names = ["ddp", "shardwise-fsdp"]
    rounds = measure_steps(this_rank(), setting(2), tiny_work, names, "steps")
    losses = {name: [round_.cases[name]["loss"] for round_ in rounds] for name in names}
    assert losses["shardwise-fsdp"] == pytest.approx(losses["ddp"], abs=1e-6)


def test_the_options_choose_the_rows() -> None:
    asked = BenchOptions(vs=("fsdp1",), ours=("fsdp",))
    assert choose_engines(asked) == ("ddp", "fsdp1", "fsdp1-orig", "shardwise-fsdp")
    assert "shardwise-hsdp" in choose_engines(BenchOptions(ranks=4, full=True))
    assert "shardwise-hsdp" not in choose_engines(BenchOptions(ranks=2, full=True))
    assert "shardwise-fsdp-transaction" not in choose_engines(BenchOptions(full=True))
    with pytest.raises(ConfigError, match="fsdp-outer: expected an even number of 2 or more"):
        choose_engines(BenchOptions(ranks=3, ours=("fsdp-outer",)))


def test_the_default_is_fast() -> None:
    ours = ("shardwise-zero2", "shardwise-fsdp", "shardwise-fsdp-dim")
    assert choose_engines(BenchOptions()) == ("ddp", "fsdp1", "fsdp2", *ours)
    assert BenchOptions().measured == ("time",)
    assert BenchOptions(full=True).measured == ("time", "traffic", "memory", "units")


@pytest.mark.parametrize(("size", "millions"), [("10M", 10), ("50M", 50), ("125M", 125)])
def test_models_have_the_size_in_their_names(size: str, millions: int) -> None:
    with torch.device("meta"):
        model = GPT(read_shape(size.lower(), sequence=16))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.02)
    assert model.shape.context == 16
    assert size in SIZES


def test_peers_are_imported_where_they_are_compared() -> None:
    importers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if imported_by(path) & PEERS
    }
    assert importers == {"bench/baselines.py", "verification/engines.py"}


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return modules | {
        f"{n.module}.{alias.name}"
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module
        for alias in n.names
    }
