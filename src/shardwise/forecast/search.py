"""Which configuration is best: memory first, which is cheap to predict, then time of what fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.candidates import Goal, configurations, offloaded
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.hardware import Cluster

__all__ = ["Progress", "Ranking", "best_alternatives", "frontier", "search"]

REFINED = 4  # of the best candidates, which are tried with another prefetch
PREFETCHES = (2, 3)
WORTHWHILE = 1.001  # times as fast, to gather further ahead

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a search has found, best first."""

    goal: Goal
    fitting: tuple[Forecast, ...]
    too_large: tuple[Forecast, ...]  # without times, the smallest first
    num_compared: int

    @property
    def winner(self) -> Forecast:
        return self.fitting[0]


def search(forecaster: Forecaster, goal: Goal, progress: Progress = lambda _: None) -> Ranking:
    """Compare the configurations of a model on a cluster.

    Micro-batches above the first that does not fit are left out. What lacks memory is tried with
    more and more on the host; the objective "memory" tries that for everything.

    Args:
        forecaster: of the model and the cluster.
        goal: what to train, and what may be chosen.
        progress: called with what is being done.

    Raises:
        ConfigError: no configuration divides the ranks and the batch.
        PlanError: the model cannot be divided in that way.
    """
    fitting: list[Forecast] = []
    too_large: list[Forecast] = []
    for one in _clusters(forecaster, goal):
        fits, others = _of_cluster(one, goal, progress)
        fitting += fits
        too_large += others
    fitting.sort(key=_key(goal))
    too_large.sort(key=lambda one: one.missing_bytes)
    return Ranking(goal, tuple(fitting), tuple(too_large), len(fitting) + len(too_large))


def _clusters(forecaster: Forecaster, goal: Goal) -> Iterator[Forecaster]:
    """All of the cluster; halves of it as well where a token's price is what counts."""
    yield forecaster
    num_devices = forecaster.cluster.num_devices
    while goal.objective == "cost" and num_devices > forecaster.cluster.devices_per_node:
        num_devices //= 2
        yield forecaster.with_devices(num_devices)


def _of_cluster(
    forecaster: Forecaster, goal: Goal, progress: Progress
) -> tuple[list[Forecast], list[Forecast]]:
    cluster = forecaster.cluster
    candidates = configurations(goal, cluster.num_devices, cluster.devices_per_node)
    in_memory: list[Forecast] = []
    too_large: list[Forecast] = []
    problem: PlanError | ConfigError | None = None
    for number, group in enumerate(groups := _by_micro_batch(candidates), start=1):
        progress(f"memory of {number} of {len(groups)} ways to shard on {_named(cluster)}")
        try:
            found = list(_until_too_large(forecaster, group))
        except (PlanError, ConfigError) as error:  # the model does not divide by a degree
            problem = error
            continue
        in_memory += [one for one in found if one.fits]
        too_large += [one for one in found if not one.fits]
    if problem is not None and not in_memory and not too_large:
        raise problem
    tight = in_memory + too_large if goal.objective == "memory" else too_large
    in_memory += [one for short in tight for one in _offloaded(forecaster, goal, short)]
    timed = []
    for number, one in enumerate(in_memory, start=1):
        progress(f"time of {number} of {len(in_memory)} configurations that fit {_named(cluster)}")
        timed.append(forecaster.timed(one))
    timed.sort(key=_key(goal))
    for one in timed[:REFINED]:
        timed += _refined(forecaster, one)
    return timed, too_large


def _named(cluster: Cluster) -> str:
    return f"{cluster.num_devices} x {cluster.accelerator.name}"


def _by_micro_batch(candidates: Iterable[Configuration]) -> list[list[Configuration]]:
    """Groups that differ in the micro-batch alone, from the smallest."""
    groups: dict[Configuration, list[Configuration]] = {}
    for one in candidates:
        groups.setdefault(replace(one, micro_batch=1, accumulation=1), []).append(one)
    return [sorted(group, key=lambda one: one.micro_batch) for group in groups.values()]


def _until_too_large(forecaster: Forecaster, group: Iterable[Configuration]) -> Iterator[Forecast]:
    """The memory of what fits, and of the first that does not."""
    for configuration in group:
        found = forecaster.memory(configuration)
        yield found
        if not found.fits:
            return


def _offloaded(forecaster: Forecaster, goal: Goal, short: Forecast) -> Iterator[Forecast]:
    """Variants that fit with something on the host: the first one, or all for least memory."""
    held = short.memory.peak
    for configuration in offloaded(goal, short.configuration):
        saved = held.activations if configuration.activation_offload else 0
        if configuration.offload != "none":
            saved += held.optimizer + held.gradients
        if configuration.offload == "parameters":
            saved += held.parameters
        if saved < short.missing_bytes:
            continue
        found = forecaster.memory(configuration)
        if found.fits:
            yield found
            if goal.objective != "memory":
                return


def _refined(forecaster: Forecaster, one: Forecast) -> Iterator[Forecast]:
    for prefetch in PREFETCHES:
        found = forecaster.memory(replace(one.configuration, prefetch=prefetch))
        if not found.fits:
            return
        found = forecaster.timed(found)
        if found.tokens_per_second < WORTHWHILE * one.tokens_per_second:
            return
        yield found


def _key(goal: Goal) -> Callable[[Forecast], Any]:
    """Best first; of equal ones, that with less memory."""
    match goal.objective:
        case "memory":
            return lambda one: (one.missing_bytes, -one.tokens_per_second)
        case "cost":
            return lambda one: (one.gpu_hours(1.0), one.missing_bytes)
        case _:
            return lambda one: (-one.tokens_per_second, one.missing_bytes)


def best_alternatives(ranking: Ranking, fields: Sequence[str]) -> list[Forecast]:
    """For each field, the best candidate of each other value that it has; each once."""
    found: list[Forecast] = []
    for field in fields:
        seen = {getattr(ranking.winner.configuration, field)}
        for one in ranking.fitting:
            value = getattr(one.configuration, field)
            if value not in seen:
                seen.add(value)
                found += [] if one in found else [one]
    return found


def frontier(ranking: Ranking) -> list[Forecast]:
    """Candidates for which no other one is faster with less memory, the fastest first."""
    found: list[Forecast] = []
    by_speed = lambda one: (one.gpu_hours(1.0), one.missing_bytes)  # noqa: E731
    for one in sorted(ranking.fitting, key=by_speed):
        if not found or one.missing_bytes < found[-1].missing_bytes:
            found.append(one)
    return found
