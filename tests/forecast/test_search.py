"""Tests which configurations a search compares and how it ranks them, with a fake forecaster."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.machines.hardware import Cluster, parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.memory.step import Certificate, Moment
from shardwise.forecast.search.candidates import Goal, Objective, configurations
from shardwise.forecast.search.scaling import Gather, scaling_curves
from shardwise.forecast.search.search import Ranking, frontier, search
from shardwise.forecast.time.replay import Replayed
from shardwise.forecast.time.step import StepTime
from shardwise.forecast.view.text import scaling_text

GB = 10**9
CLUSTER = parse_cluster("64xH100")


class Fake:
    """Predicts 90 GB of parameters, and 12 GB of activations and one second per sequence."""

    def __init__(self, cluster: Cluster = CLUSTER) -> None:
        self.cluster = cluster
        self.queried: list[Configuration] = []

    def with_devices(self, num_devices: int) -> "Fake":
        return type(self)(replace(self.cluster, num_devices=num_devices))

    @property
    def machine(self) -> Machine:
        return Machine.of(self.cluster)

    def plan(self, one: Configuration) -> object:
        ranks = SimpleNamespace(world_size=one.shard_size, replicas=one.replicas)
        unit = SimpleNamespace(gathered_bytes=GB, options=ranks, has_own_ranks=False, subgroup=0)
        return SimpleNamespace(units=[unit, unit], strategy=one.row, **vars(ranks))

    def memory(self, one: Configuration) -> Forecast:
        self.queried.append(one)
        if one.tensor > 4:
            raise PlanError("8 heads do not divide by tensor=8")
        kept = {"none": 12, "products": 6, "full": 1}[cast("str", one.checkpointing)]
        is_sharded = one.strategy not in ("ddp", "zero1", "zero2")
        moment = Moment(
            label="backward",
            parameters=90 * GB // (one.shard_size if is_sharded else 1) // one.tensor,
            optimizer=0 if one.offload != "none" else 160 * GB // one.shard_size // one.tensor,
            activations=kept * GB * one.micro_batch * (not one.activation_offload),
        )
        return Forecast(one, self.cluster, Certificate((moment,)))

    def timed(self, found: Forecast) -> Forecast:
        one = found.configuration
        work = {"none": 1.0, "products": 1.1, "full": 1.3}[cast("str", one.checkpointing)]
        compute = work * one.accumulation * (one.micro_batch + 0.1) / one.tensor
        exposed = 0.0 if one.prefetch > 1 else 0.02 * one.accumulation
        exposed += 0.0001 * one.accumulation * one.shard_size + 1e-6 * one.world_size
        update = 5.0 if one.offload != "none" else 0.0
        seconds = compute + exposed + update
        breakdown = {"matmul": compute, "exposed communication": exposed, "optimizer": update}
        tokens = one.tokens_per_step / one.world_size
        replayed = Replayed(seconds, (exposed,), 0, ((),))
        time = StepTime(
            seconds, tokens / seconds, 1.0, 1.0, 1.0, exposed, breakdown, "matmul", replayed
        )
        return replace(found, time=time)


def rank(goal: Goal, fake: Fake | None = None) -> Ranking:
    return search(cast("Forecaster", fake or Fake()), goal)


def test_the_winner_is_the_fastest_that_fits() -> None:
    ranking = rank(Goal(global_batch=512))
    speeds = [one.tokens_per_second for one in ranking.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.fits for one in ranking.fitting)
    best = ranking.winner.configuration
    # Smaller shard groups are faster; 8 sequences do not fit.
    assert (best.strategy, best.shard_size, best.checkpointing) == ("hsdp", 8, "none")
    assert (best.micro_batch, best.accumulation, best.prefetch) == (4, 2, 2)
    assert ranking.too_large
    assert all(one.missing_bytes > 0 for one in ranking.too_large)
    assert ranking.num_compared == len(ranking.fitting) + len(ranking.too_large)


def test_larger_micro_batches_than_the_first_misfit_are_skipped() -> None:
    fake = Fake()
    ranking = rank(Goal(global_batch=2048, strategies=("fsdp",), checkpointing=("none",)), fake)
    plain = [one.micro_batch for one in fake.queried if one.offload == "none" and one.prefetch == 1]
    assert plain == [1, 2, 4, 8]  # of 32 sequences per rank; 8 need 96 GB
    assert [one.configuration.micro_batch for one in ranking.too_large] == [8]


def test_larger_micro_batches_than_the_first_misfit_are_tried_with_offload() -> None:
    """One sequence takes 43 GB of 42; one and two fit with states on the host."""
    goal = Goal(global_batch=64, strategies=("fsdp",), checkpointing=("none",))
    ranking = rank(goal, Fake(parse_cluster("8xA100-40GB")))
    assert [one.configuration.micro_batch for one in ranking.too_large] == [1]
    assert {one.configuration.micro_batch for one in ranking.fitting} == {1, 2}
    best = ranking.winner.configuration
    assert (best.micro_batch, best.offload) == (2, "optimizer")


class Accumulating(Fake):
    """Adds 30 GB of gradients that several micro-batches accumulate."""

    def memory(self, one: Configuration) -> Forecast:
        found = super().memory(one)
        [moment] = found.memory.timeline
        kept = replace(moment, gradients=30 * GB * (one.accumulation > 1))
        return replace(found, memory=Certificate((kept,)))


def test_a_batch_may_fit_at_once_where_parts_of_it_do_not() -> None:
    """Of 42 GB, half of the batch takes 16 + 12 + 30, and all of it 16 + 24."""
    fake = Accumulating(parse_cluster("16xA100-40GB"))
    goal = Goal(global_batch=32, strategies=("fsdp",), checkpointing=("none",), offload=("none",))
    ranking = rank(goal, fake)
    assert {one.configuration.micro_batch for one in ranking.fitting} == {2}
    fake.queried.clear()
    rank(replace(goal, global_batch=16 * 64), fake)
    assert [one.micro_batch for one in fake.queried if one.prefetch] == [1]  # 64 need more


def test_offload_is_tried_only_if_it_may_suffice() -> None:
    ranking = rank(Goal(global_batch=64, strategies=("ddp",)), Fake())
    assert not ranking.fitting  # 90 GB of parameters
    ranking = rank(Goal(global_batch=64, strategies=("hsdp",)), Fake(parse_cluster("16xA100-40GB")))
    offloaded = [one for one in ranking.fitting if one.configuration.offload == "optimizer"]
    assert offloaded  # 31 GB per rank and 12 of activations do not fit into 39
    assert ranking.winner.configuration.offload == "none"


class Gathering(Fake):
    """Adds 35 GB of each unit that is gathered, and memory that optimizer states split."""

    def memory(self, one: Configuration) -> Forecast:
        found = super().memory(one)
        [moment] = found.memory.timeline
        gathered = replace(moment, gathered=35 * GB * (1 + one.prefetch))
        return replace(found, memory=Certificate((gathered,), reserve_bytes=moment.optimizer))


def test_memory_that_states_split_counts_as_saved_by_offload() -> None:
    goal = Goal(global_batch=8, strategies=("fsdp",), checkpointing=("full",))
    ranking = rank(goal, Gathering(parse_cluster("8xA100-80GB")))
    assert ranking.winner.configuration.offload == "optimizer"
    assert ranking.too_large[0].missing_bytes > 20 * GB, "more than the 20 GB of states"


def test_without_prefetch_and_with_offload_a_larger_model_fits() -> None:
    goal = Goal(global_batch=4, strategies=("fsdp",))
    ranking = rank(goal, Gathering(parse_cluster("4xA100-80GB")))
    best = ranking.winner
    assert best.fits
    assert best.step.seconds > 0
    assert (best.configuration.prefetch, best.configuration.offload) == (0, "optimizer")


@pytest.mark.parametrize("objective", ["tokens/s", "memory", "cost"])
def test_if_nothing_fits_the_smallest_with_offload_has_a_time(objective: Objective) -> None:
    goal = Goal(global_batch=16, strategies=("fsdp",), objective=objective)
    ranking = rank(goal, Gathering(parse_cluster("16xT4")))
    assert not ranking.fitting
    nearest = ranking.winner
    sizes = [one.missing_bytes for one in ranking.too_large]
    assert nearest.missing_bytes == min(sizes) > 0
    assert nearest.step.seconds > 0
    chosen = nearest.configuration
    assert (chosen.prefetch, chosen.offload, chosen.activation_offload) == (0, "parameters", True)


def test_the_objectives_memory_and_cost_minimize_memory_and_gpus() -> None:
    least = rank(Goal(global_batch=512, objective="memory")).winner
    assert all(
        least.memory.device_bytes <= one.memory.device_bytes
        for one in rank(Goal(global_batch=512, objective="memory")).fitting
    )
    assert least.configuration.offload != "none"
    cheapest = rank(Goal(global_batch=512, objective="cost")).winner
    assert cheapest.cluster.num_devices == 8  # the smallest group that exchanges shards
    assert cheapest.gpu_hours(1e12) < rank(Goal(global_batch=512)).winner.gpu_hours(1e12)


def test_no_candidate_of_the_frontier_is_dominated() -> None:
    ranking = rank(Goal(global_batch=512))
    found = frontier(ranking)
    assert found[0].tokens_per_second == ranking.winner.tokens_per_second
    for one in found:
        assert not any(
            other.tokens_per_second > one.tokens_per_second
            and other.memory.device_bytes < one.memory.device_bytes
            for other in ranking.fitting
        )


def test_degrees_that_do_not_divide_the_model_are_left_out() -> None:
    ranking = rank(Goal(global_batch=512, tensor="auto"))
    assert {one.configuration.tensor for one in ranking.fitting} == {1, 2, 4}
    with pytest.raises(PlanError, match="8 heads do not divide by tensor=8"):
        rank(Goal(global_batch=512, tensor=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 500}, "use 448 or 512"),
        ({"global_batch": 32}, "use 64, or tensor=2"),
        ({"tensor": 3}, "tensor=3: expected a number of ranks divisible by 3, got 64"),
        ({"expert": 5}, "expert=5: expected a number of ranks divisible by 5, got 64"),
        (
            {"chunks": 2, "pipeline": 4, "micro_batches": (16,)},
            "chunks=2: no number of micro-batches is a multiple of pipeline=4",
        ),
        ({"micro_batches": (3,)}, "micro_batch=3: expected a divisor of the 8 sequences per rank"),
    ],
)
def test_errors_suggest_sizes_that_divide_evenly(change: dict[str, object], message: str) -> None:
    goal = Goal(**{"global_batch": 512} | change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        configurations(goal, 64, 8)


def test_configurations_divide_ranks_and_batch() -> None:
    for one in configurations(Goal(global_batch=512, tensor="auto", context=2), 64, 8):
        assert one.world_size == 64
        assert one.global_batch == 512
    uneven = configurations(Goal(global_batch=64 * 12), 64, 8)
    assert {one.micro_batch for one in uneven} == {1, 2, 3, 4, 6, 12}
    several = configurations(Goal(global_batch=12, context="auto"), 1, 1)
    assert {one.micro_batch for one in several} == {1, 2, 4, 12}
    chunked = configurations(Goal(global_batch=512, pipeline=4, chunks="auto"), 64, 8)
    assert {one.chunks for one in chunked} == {1, 2, 4}
    assert all(one.chunks == 1 or one.accumulation % 4 == 0 for one in chunked)


def test_one_rank_and_units_have_no_strategies_that_do_the_same() -> None:
    assert {one.strategy for one in configurations(Goal(global_batch=8), 1, 8)} == {"fsdp"}
    two_axes = configurations(Goal(global_batch=64, strategies=("hsdp-zero2",)), 64, 8)
    assert {(one.shard_size, one.replicas) for one in two_axes} == {(8, 8), (32, 2)}
    with pytest.raises(
        ConfigError, match="strategy=hsdp: expected more than 8 data-parallel ranks"
    ):
        configurations(Goal(global_batch=64, strategies=("hsdp",)), 8, 8)
    reproducible = Configuration(reproducible=64)
    with pytest.raises(ConfigError, match="strategy=hsdp: expected more"):
        configurations(Goal(global_batch=64, strategies=("hsdp",), settings=reproducible), 8, 8)
    no_blocks = Goal(global_batch=8, settings=Configuration(units=None))
    assert {one.checkpointing for one in configurations(no_blocks, 1, 8)} == {"none"}


def test_micro_batches_need_to_divide_the_batch_of_one_degree() -> None:
    """A rank has 2 sequences, and with tensor=2 it has 4."""
    goal = Goal(global_batch=16, tensor="auto", micro_batches=(2, 4))
    found = {(one.tensor, one.micro_batch) for one in configurations(goal, 8, 8)}
    assert found == {(1, 2), (2, 2), (2, 4), (4, 2), (4, 4), (8, 2), (8, 4)}
    with pytest.raises(ConfigError, match="micro_batch=3: expected a divisor of the 16 sequences"):
        configurations(replace(goal, micro_batches=(2, 3)), 8, 8)


@pytest.mark.parametrize(
    ("cluster", "change"),
    [
        ("24xH100", {"tensor": 4}),  # half of the cluster has 12 GPUs, and 6 of these no 4
        ("16xH100", {"strategies": ("hsdp",)}),  # which is nothing on one node
        ("16xH100", {"expert": 8, "tensor": 2}),
        ("25xH100", {}),  # half of the cluster does not divide the batch
    ],
)
def test_parts_of_a_cluster_that_a_degree_does_not_divide_cost_nothing(
    cluster: str, change: dict[str, Any]
) -> None:
    devices = parse_cluster(cluster)
    goal = Goal(global_batch=8 * devices.num_devices, objective="cost", **change)
    ranking = rank(goal, Fake(devices))
    assert devices.num_devices in {one.cluster.num_devices for one in ranking.fitting}
    with pytest.raises(ConfigError, match="tensor=7: expected a number of ranks divisible by 7"):
        rank(replace(goal, tensor=7, expert=1), Fake(devices))


def test_scaling_curves_leave_out_sizes_that_a_degree_does_not_divide() -> None:
    def sizes(**options: Any) -> list[list[int]]:
        base = Configuration(**{"shard_size": 16, "reproducible": 0} | options)
        curves = scaling_curves(cast("Forecaster", Fake()), base)
        points = [one for curve in curves for one in curve.points]
        assert all(one.configuration.world_size == one.cluster.num_devices for one in points)
        leaves = {one.configuration.data_parallel * base.accumulation for one in points}
        if base.reproducible:
            assert leaves == {one.configuration.reproducible for one in points}
        return [[one.cluster.num_devices for one in curve.points][:2] for curve in curves]

    assert sizes() == [[8, 16], [16, 32]]
    assert sizes(expert=8, tensor=4) == [[32, 64], [64, 128]]
    assert sizes(pipeline=12) == [[48, 96], [192, 384]]
    assert sizes(reproducible=64, accumulation=4) == [[8, 16], [16, 32]]
    assert sizes(outer=sw.Outer(), outer_replicas=2) == [[8, 16], [32, 64]]


def test_scaling_curves_have_a_bend() -> None:
    found = rank(Goal(global_batch=512, strategies=("fsdp",))).winner.configuration
    over_all, hybrid = scaling_curves(cast("Forecaster", Fake()), found)
    assert [one.cluster.num_devices for one in over_all.points][-1] == 16_384
    assert all(one.configuration.world_size == one.cluster.num_devices for one in over_all.points)
    assert over_all.bend is not None
    best, bent = over_all.bend
    assert bent.step.tokens_per_second < 0.95 * best.step.tokens_per_second
    assert hybrid.bend is None
    assert {one.configuration.shard_size for one in hybrid.points} == {64}
    assert over_all.gathers[-1].seconds > over_all.gathers[0].seconds
    assert over_all.gathers[-1].latency_seconds < over_all.gathers[-1].seconds
    assert len({one.seconds for one in hybrid.gathers}) == 1
    alone = replace(hybrid, gathers=(Gather(GB, 0.0, 0.0),) * len(hybrid.gathers))
    assert scaling_text([alone])[0].endswith("Nothing is gathered.")


def test_what_is_close_is_to_be_measured() -> None:
    """From 10 % below the peak of tensors to 5 % above all bytes, beside 84.9 GB of memory."""
    verdicts = {}
    for peak, reserve in ((70, 0), (70, 9), (75, 8), (83, 0), (90, 0), (95, 0)):
        moment = Moment(label="update", activations=peak * 10**9)
        memory = Certificate((moment,), reserve_bytes=reserve * 10**9)
        found = Forecast(Configuration(), parse_cluster("1xH100"), memory)
        verdicts[peak, reserve] = found.verdict
    assert verdicts == {
        (70, 0): "fits",
        (70, 9): "fits",
        (75, 8): "close: measure it",
        (83, 0): "close: measure it",
        (90, 0): "close: measure it",
        (95, 0): "does not fit",
    }
