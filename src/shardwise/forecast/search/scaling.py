"""Scaling curves: throughput of a configuration by number of devices."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.time.groups import groups_of

__all__ = ["MAX_DEVICES", "Curve", "Gather", "scaling_curves"]

MAX_DEVICES = 16_384
_BEND = 0.95  # share of the best throughput per device below which a curve bends
_HYBRID = "hsdp"


@dataclass(frozen=True, slots=True)
class Gather:
    """The all-gather of the largest block that is gathered."""

    num_bytes: int
    seconds: float
    latency_seconds: float  # part of ``seconds``: hops between ranks


@dataclass(frozen=True)
class Curve:
    """Forecasts on increasing numbers of devices with constant work per device."""

    label: str
    points: tuple[Forecast, ...]
    gathers: tuple[Gather, ...]  # one per point

    @property
    def bend(self) -> tuple[Forecast, Forecast] | None:
        """The point with the best throughput per device, and the first later one below linear."""
        best = max(self.points, key=_per_device)
        after = self.points[self.points.index(best) :]
        return next(
            ((best, point) for point in after if _per_device(point) < _BEND * _per_device(best)),
            None,
        )


def _per_device(forecast: Forecast) -> float:
    return forecast.tokens_per_second / forecast.cluster.num_devices


def scaling_curves(
    forecaster: Forecaster,
    configuration: Configuration,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Curve]:
    """Forecast a configuration on up to `MAX_DEVICES`, sharded over all or with replicated shards.

    The batch grows with the number of devices. Sizes that a degree does not divide, and those on
    which it does not fit, are left out.
    """
    row, size = configuration.row, configuration.shard_size
    shardings: dict[str, Callable[[int], Configuration]] = {}
    if row.shards:
        over_all = "fsdp" if row.num_axes > 1 else configuration.strategy
        hybrid = configuration.strategy if row.num_axes > 1 else _HYBRID
        shardings[f"{over_all} over all"] = lambda ranks: replace(
            configuration, strategy=over_all, shard_size=ranks, replicas=1
        )
        shardings[f"{hybrid}, shards of {size}"] = lambda ranks: replace(
            configuration, strategy=hybrid, replicas=max(1, ranks // size)
        )
    else:
        shardings[configuration.strategy] = lambda ranks: replace(configuration, replicas=ranks)
    curves = []
    for label, at in shardings.items():
        progress(f"scaling: {label}")
        found = list(_points(forecaster, configuration, at))
        if len(found) > 1:
            points, gathers = zip(*found, strict=True)
            curves.append(Curve(label, points, gathers))
    return curves


def _points(
    forecaster: Forecaster, base: Configuration, at: Callable[[int], Configuration]
) -> Iterator[tuple[Forecast, Gather]]:
    of_rank = base.model_parallel * base.outer_replicas
    for num_devices in _sizes(lcm(forecaster.cluster.devices_per_node, of_rank)):
        ranks = num_devices // of_rank
        try:
            configuration = at(ranks)
        except PlanError:  # the experts do not divide over so few ranks
            continue
        if base.reproducible:
            leaves = base.accumulation * configuration.data_parallel
            configuration = replace(configuration, reproducible=leaves)
        if configuration.world_size != num_devices:
            continue
        there = forecaster.with_devices(num_devices)
        try:
            found = there.memory(configuration)
        except PlanError:
            if configuration.expert == 1:
                raise
            continue  # the ranks with the same experts are not a multiple of a subgroup
        if found.fits:
            yield there.timed(found), _gather(there, configuration)


def _gather(forecaster: Forecaster, configuration: Configuration) -> Gather:
    plan = forecaster.plan(configuration)
    blocks = [
        (unit.gathered_bytes, groups_of(plan, unit, configuration).all)
        for unit in plan.units[1:] or plan.units
    ]
    # Experts that no other rank has need no gather.
    num_bytes, group = max(blocks, key=lambda block: (block[1].size > 1, block[0]))
    seconds = partial(forecaster.machine.all_gather_seconds, group=group)
    return Gather(num_bytes, seconds(num_bytes), seconds(1))


def _sizes(first: int) -> Iterable[int]:
    while first <= MAX_DEVICES:
        yield first
        first *= 2
