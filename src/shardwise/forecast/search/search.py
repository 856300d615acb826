"""Searches for the best configuration: predicts memory first, and time only for what fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.search.candidates import Goal, configurations, offloaded

__all__ = ["Progress", "Ranking", "best_alternatives", "frontier", "search"]

_NUM_REFINED = 4  # number of best candidates that are also tried with a larger prefetch
_PREFETCHES = (2, 3)
_MIN_SPEEDUP = 1.001  # minimum speedup for a larger prefetch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a search, best first."""

    goal: Goal
    fitting: tuple[Forecast, ...]
    too_large: tuple[Forecast, ...]  # smallest first; without times, but for the winner's

    @property
    def num_compared(self) -> int:
        return len(self.fitting) + len(self.too_large)

    @property
    def winner(self) -> Forecast:
        """The best configuration that fits; if none does, the one that lacks the least memory."""
        return (self.fitting or self.too_large)[0]


def search(forecaster: Forecaster, goal: Goal, progress: Progress = lambda _: None) -> Ranking:
    """Compare the configurations of a model on a cluster.

    Micro-batches above the first that does not fit are tried with offload, in increasing amounts,
    up to the first that does not fit with it either; with the objective "memory", also those that
    fit. All of a rank's batch at once is tried without offload if it may fit, because no gradients
    are accumulated then. If still none fits, all are tried with offload and without prefetch.

    Args:
        forecaster: predicts steps of the model on the cluster.
        goal: what to train and which configurations to try.
        progress: called with a description of the work under way.

    Raises:
        ConfigError: no configuration divides the ranks and the batch evenly.
        PlanError: the model cannot be divided in that way, or the device has no 8-bit products.
    """
    if goal.settings.float8 != "none":  # before the memory of all configurations is predicted
        forecaster.machine.check_float8(goal.settings.float8)
    if forecaster.machine.computes_on_cpu:  # ranks compute in the memory of the host
        goal = replace(goal, offload=("none",))
    fitting: list[Forecast] = []
    too_large: list[Forecast] = []
    for on_cluster in _clusters(forecaster, goal):
        try:
            fits, misfits = _search_cluster(on_cluster, goal, progress)
        except (PlanError, ConfigError):
            if on_cluster is forecaster:
                raise
            continue  # a degree or the batch does not divide this part of the cluster
        fitting += fits
        too_large += misfits
    if not fitting:
        progress("memory with offload and without prefetch")
        smaller = [one for base in too_large for one in _without_prefetch(forecaster, goal, base)]
        fitting = [_timed(forecaster, forecast) for forecast in smaller if forecast.fits]
        too_large += [forecast for forecast in smaller if not forecast.fits]
    fitting.sort(key=_key(goal))
    too_large.sort(key=lambda forecast: forecast.missing_bytes)
    if not fitting:
        too_large[0] = _timed(forecaster, too_large[0])
    return Ranking(goal, tuple(fitting), tuple(too_large))


def _clusters(forecaster: Forecaster, goal: Goal) -> Iterator[Forecaster]:
    """Yield a forecaster for the cluster and, for the objective "cost", for halves of it."""
    yield forecaster
    num_devices = forecaster.cluster.num_devices
    while goal.objective == "cost" and num_devices > forecaster.cluster.devices_per_node:
        num_devices //= 2
        yield forecaster.with_devices(num_devices)


def _search_cluster(
    forecaster: Forecaster, goal: Goal, progress: Progress
) -> tuple[list[Forecast], list[Forecast]]:
    cluster = forecaster.cluster
    name = f"{cluster.num_devices} x {cluster.accelerator.name}"
    candidates = configurations(goal, cluster.num_devices, cluster.devices_per_node)
    in_memory: list[Forecast] = []
    too_large: list[Forecast] = []
    with_offload: list[Forecast] = []
    problem: PlanError | ConfigError | None = None
    for number, group in enumerate(groups := _by_micro_batch(candidates), start=1):
        progress(f"memory of {number} of {len(groups)} ways to shard on {name}")
        try:
            found = list(_until_too_large(forecaster, group))
        except (PlanError, ConfigError) as error:  # a degree does not divide the model
            problem = error
            continue
        in_memory += [forecast for forecast in found if forecast.fits]
        if found[-1].fits:
            continue
        too_large.append(found[-1])
        if _may_fit_at_once(found[-1], group[-1]):
            at_once = forecaster.memory(group[-1])
            in_memory += [at_once] if at_once.fits else []
        larger = (forecaster.memory(one) for one in group[len(found) :])
        with_offload += _until_none_fits(forecaster, goal, chain(found[-1:], larger))
    if problem is not None and not in_memory and not too_large:
        raise problem
    if goal.objective == "memory":
        for base in in_memory:
            with_offload += _offloaded(forecaster, goal, base)
    in_memory += with_offload
    timed = []
    for number, forecast in enumerate(in_memory, start=1):
        progress(f"time of {number} of {len(in_memory)} configurations that fit {name}")
        timed.append(forecaster.timed(forecast))
    timed.sort(key=_key(goal))
    for forecast in timed[:_NUM_REFINED]:
        timed += _refined(forecaster, forecast)
    return timed, too_large


def _by_micro_batch(candidates: Iterable[Configuration]) -> list[list[Configuration]]:
    """Group candidates that differ only in the micro-batch, which ascends within a group."""
    groups: dict[Configuration, list[Configuration]] = {}
    for candidate in candidates:
        groups.setdefault(replace(candidate, micro_batch=1, accumulation=1), []).append(candidate)
    return [sorted(group, key=lambda candidate: candidate.micro_batch) for group in groups.values()]


def _until_too_large(forecaster: Forecaster, group: Iterable[Configuration]) -> Iterator[Forecast]:
    """Yield the memory of the candidates up to the first that does not fit."""
    for configuration in group:
        found = forecaster.memory(configuration)
        yield found
        if not found.fits:
            return


def _may_fit_at_once(misfit: Forecast, last: Configuration) -> bool:
    """Whether all of a rank's batch may fit, because no gradients are kept during forward."""
    factor = last.micro_batch / misfit.configuration.micro_batch
    if factor == 1 or last.accumulation > 1:
        return False
    peak = misfit.memory.peak
    more = (factor - 1) * peak.activations
    return misfit.missing_bytes + more <= peak.gradients + peak.communication


def _until_none_fits(
    forecaster: Forecaster, goal: Goal, bases: Iterable[Forecast]
) -> Iterator[Forecast]:
    """Yield what fits with offload of candidates that do not fit without it, smallest first."""
    for base in bases:
        found = list(_offloaded(forecaster, goal, base))
        yield from found
        if not found:
            return


def _offloaded(forecaster: Forecaster, goal: Goal, base: Forecast) -> Iterator[Forecast]:
    """Yield the first variant that fits with offload, or all for the objective "memory"."""
    peak = base.memory.peak
    for configuration in offloaded(goal, base.configuration):
        saved = base.memory.reserve_bytes  # states that split blocks are a reason for it
        saved += peak.activations if configuration.activation_offload else 0
        if configuration.offload != "none":
            saved += peak.optimizer + peak.gradients
        if configuration.offload == "parameters":
            saved += peak.parameters
        if saved < base.missing_bytes:
            continue
        found = forecaster.memory(configuration)
        if found.fits:
            yield found
            if goal.objective != "memory":
                return


def _without_prefetch(forecaster: Forecaster, goal: Goal, base: Forecast) -> Iterator[Forecast]:
    """Yield variants with increasing amounts of offload, up to the first that fits."""
    on_cluster = forecaster.with_devices(base.cluster.num_devices)
    for configuration in (base.configuration, *offloaded(goal, base.configuration)):
        found = on_cluster.memory(replace(configuration, prefetch=0))
        yield found
        if found.fits:
            return


def _timed(forecaster: Forecaster, forecast: Forecast) -> Forecast:
    return forecaster.with_devices(forecast.cluster.num_devices).timed(forecast)


def _refined(forecaster: Forecaster, forecast: Forecast) -> Iterator[Forecast]:
    for prefetch in _PREFETCHES:
        found = forecaster.memory(replace(forecast.configuration, prefetch=prefetch))
        if not found.fits:
            return
        found = forecaster.timed(found)
        if found.tokens_per_second < _MIN_SPEEDUP * forecast.tokens_per_second:
            return
        yield found


def _key(goal: Goal) -> Callable[[Forecast], Any]:
    """Return a sort key, best first; ties are broken by less memory or more speed."""
    match goal.objective:
        case "memory":
            return lambda forecast: (forecast.missing_bytes, -forecast.tokens_per_second)
        case "cost":
            return lambda forecast: (forecast.gpu_hours(1.0), forecast.missing_bytes)
        case _:
            return lambda forecast: (-forecast.tokens_per_second, forecast.missing_bytes)


def best_alternatives(ranking: Ranking, fields: Sequence[str]) -> list[Forecast]:
    """For each field, return the best candidate with each value that the winner does not have."""
    found: list[Forecast] = []
    for field in fields:
        seen = {getattr(ranking.winner.configuration, field)}
        for forecast in ranking.fitting:
            value = getattr(forecast.configuration, field)
            if value not in seen:
                seen.add(value)
                found += [] if forecast in found else [forecast]
    return found


def frontier(ranking: Ranking) -> list[Forecast]:
    """Return the candidates that no other beats in both speed and memory, fastest first."""
    found: list[Forecast] = []
    by_speed = lambda forecast: (forecast.gpu_hours(1.0), forecast.missing_bytes)  # noqa: E731
    for forecast in sorted(ranking.fitting, key=by_speed):
        if not found or forecast.missing_bytes < found[-1].missing_bytes:
            found.append(forecast)
    return found
