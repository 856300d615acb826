"""Text about a search: its winner, why it beats the others, what bounds it, and how it scales."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from shardwise.forecast.configuration import MODEL_AXES, Configuration
from shardwise.forecast.forecast import Forecast
from shardwise.forecast.machines.hardware import Cluster
from shardwise.forecast.search.scaling import Curve
from shardwise.forecast.search.search import Ranking, best_alternatives
from shardwise.page.formatting import bytes_text, seconds_text
from shardwise.plan.spelling import counted

__all__ = [
    "DEFINITIONS",
    "Budget",
    "describe",
    "missing_text",
    "peak_text",
    "reasons",
    "scaling_text",
    "settings_texts",
    "with_device_word",
]

# "definitions" of figures; by cause of a step's time, what a step is bound by ("bounds"), and what
# another one takes more ("costs").
_WORDS: dict[str, dict[str, str]] = json.loads(
    (files(__package__) / "words.json").read_text("utf-8")
)
DEFINITIONS = _WORDS["definitions"]
_COMPARED = (
    "strategy",
    "checkpointing",
    "micro_batch",
    "tensor",
    "chunks",
    "prefetch",
    "offload",
)
MOST_REASONS = 8
_LARGEST = 3  # categories of memory that are named if a configuration does not fit


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of a training run and the price of a GPU."""

    tokens: float | None = None
    price: float | None = None  # per GPU-hour

    def summary(self, forecast: Forecast) -> str:
        """Return GPU-hours, days and cost; "" without a number of tokens."""
        if self.tokens is None:
            return ""
        hours = forecast.gpu_hours(self.tokens)
        days = hours / forecast.cluster.num_devices / 24
        cost = "" if self.price is None else f", {hours * self.price:,.0f} at {self.price:g} each"
        return with_device_word(
            forecast.cluster, f"{hours:,.0f} GPU-hours ({days:,.1f} days){cost}"
        )


def with_device_word(cluster: Cluster, text: str) -> str:
    """Replace "GPU" in ``text`` by the word for the devices of ``cluster``."""
    return text.replace("GPU", cluster.device_word)


def _sharding_text(configuration: Configuration) -> str:
    """Format the sharding, such as ``fsdp over 64`` or ``hsdp over 8 x 8``."""
    if configuration.row.num_axes > 1:
        ranks = f"{configuration.replicas} x {configuration.shard_ranks}"
    else:
        ranks = str(configuration.data_parallel * configuration.context)
    copies = f"{configuration.outer_replicas} replicas of " * (configuration.outer is not None)
    return f"{copies}{configuration.strategy} over {ranks}"


def _host_text(configuration: Configuration) -> str:
    """Format what is kept on the host: optimizer, parameters, activations."""
    kept = [configuration.offload] if configuration.offload != "none" else []
    return " and ".join(kept + ["activations"] * configuration.activation_offload)


def _step_text(configuration: Configuration) -> str:
    return "optimizer steps on the device" if configuration.offload_step == "device" else ""


def _degrees_text(configuration: Configuration) -> str:
    """Format the model-parallel axes, such as ``tensor 2``."""
    names = [name for name in (*MODEL_AXES, "chunks") if getattr(configuration, name) > 1]
    return ", ".join(f"{name} {getattr(configuration, name)}" for name in names)


def settings_texts(configuration: Configuration) -> tuple[str, ...]:
    """Format sharding, micro-batches, checkpointing, what is on the host, and prefetch."""
    return (
        ", ".join(filter(None, (_sharding_text(configuration), _degrees_text(configuration)))),
        f"{configuration.accumulation} x {configuration.micro_batch}",
        str(configuration.checkpointing),
        ", ".join(filter(None, (_host_text(configuration), _step_text(configuration)))),
        str(configuration.prefetch),
    )


def describe(configuration: Configuration) -> str:
    """Describe a configuration in one line that is unique among the candidates of a search."""
    micro = f"{configuration.accumulation} x {configuration.micro_batch}"
    parts = [_sharding_text(configuration), f"micro-batches {micro}"]
    if degrees := _degrees_text(configuration):
        parts.append(degrees)
    parts.append(f"checkpointing {configuration.checkpointing}")
    if kept := _host_text(configuration):
        parts.append(f"{kept} on the host")
    if step := _step_text(configuration):
        parts.append(step)
    if configuration.prefetch != 1:
        parts.append(f"prefetch {configuration.prefetch}")
    return ", ".join(parts)


def reasons(ranking: Ranking) -> list[str]:
    """Explain why the winner is best: what bounds it, and what its alternatives cost or lack."""
    found = [_bound(ranking.winner)]
    if not ranking.winner.fits:
        return found
    winner = ranking.winner.configuration
    found += [
        f"{_named(winner, other.configuration)}: {_difference(ranking, other)}"
        for other in best_alternatives(ranking, _COMPARED)
    ]
    found = found[:MOST_REASONS] + list(_too_large(ranking))
    return [with_device_word(ranking.winner.cluster, line) for line in found]


def _bound(winner: Forecast) -> str:
    step = winner.step
    share = step.breakdown[step.bound] / step.seconds
    exposed = step.exposed_seconds / step.seconds
    return (
        f"Bound by {_WORDS['bounds'].get(step.bound, step.bound)}: {share:.0%} of a step. "
        f"Exposed communication takes {exposed:.1%}."
    )


def _named(winner: Configuration, other: Configuration) -> str:
    """Describe where a candidate differs from the winner."""
    parts = []
    if _sharding_text(other) != _sharding_text(winner):
        parts.append(_sharding_text(other))
    if other.checkpointing != winner.checkpointing:
        parts.append(f"checkpointing {other.checkpointing}")
    if _host_text(other) != _host_text(winner):
        parts.append(f"{_host_text(other) or 'nothing'} on the host")
    if other.offload_step != winner.offload_step and other.offload != "none":
        parts.append(_step_text(other) or "optimizer steps on the host")
    parts += [
        f"{field.replace('_', '-')} {getattr(other, field)}"
        for field in ("micro_batch", "prefetch", *MODEL_AXES, "chunks")
        if getattr(other, field) != getattr(winner, field)
    ]
    return ", ".join(parts)


def _difference(ranking: Ranking, other: Forecast) -> str:
    winner = ranking.winner
    ratio = other.gpu_hours(1.0) / winner.gpu_hours(1.0)
    saved = winner.memory.device_bytes - other.memory.device_bytes
    memory = f"{bytes_text(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else "the same"
    if abs(ratio - 1) < 0.0005:  # noqa: PLR2004 - 1.000
        return f"as fast, with {memory} memory"
    is_close = abs(ratio - 1) < 0.1  # noqa: PLR2004 - three digits
    what = "step time" if other.cluster == winner.cluster else "GPU-hours"
    times = f"{ratio:.{2 + is_close}f} times the {what}"
    if ratio < 1:
        return f"{times}, but needs {memory} memory"
    cause = _largest_cost(winner.step.breakdown, other.step.breakdown)
    return f"{times}, {memory} memory{f': {cause}' if cause else ''}"


def _largest_cost(winner: Mapping[str, float], other: Mapping[str, float]) -> str:
    more = {name: seconds - winner.get(name, 0.0) for name, seconds in other.items()}
    name = max(more, key=lambda cause: more[cause])
    if more[name] <= 0 or name not in _WORDS["costs"]:
        return ""
    return _WORDS["costs"][name].format(more=seconds_text(more[name]))


def _too_large(ranking: Ranking) -> Iterator[str]:
    """For each kind of checkpointing, describe the smallest candidate that does not fit.

    Only candidates with the winner's sharding count, without offload.
    """
    best = ranking.winner.configuration
    offloaded = {
        replace(
            one.configuration, offload="none", offload_step="host", activation_offload=False
        ): one.configuration
        for one in reversed(ranking.fitting)
        if _host_text(one.configuration)
    }
    seen = set()
    for forecast in ranking.too_large:
        one = forecast.configuration
        kind = one.checkpointing
        if kind in seen or _host_text(one) or _sharding_text(one) != _sharding_text(best):
            continue
        seen.add(kind)
        text = "does not fit, needs "
        if one in offloaded:
            on_host = _host_text(offloaded[one])
            text = f"fits only with {on_host} on the host; without offload it needs "
        elif ranking.goal.offload != ("none",):
            text = "does not fit even with offload; without offload it needs "
        yield f"checkpointing {kind}, micro-batch {one.micro_batch}: {text}{missing_text(forecast)}"


def missing_text(forecast: Forecast) -> str:
    """Format by how much a configuration exceeds the memory of a device."""
    available = bytes_text(forecast.cluster.accelerator.memory_bytes)
    return with_device_word(
        forecast.cluster, f"{bytes_text(forecast.missing_bytes)} more than a GPU's {available}"
    )


def peak_text(forecast: Forecast) -> str:
    """Format the largest categories of memory at the peak."""
    peak = forecast.memory.peak
    largest = sorted(peak.by_category().items(), key=lambda item: -item[1])[:_LARGEST]
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest if size)
    return f"at {peak.label}: {held}"


def scaling_text(curves: list[Curve]) -> list[str]:
    """Describe where each curve bends and why."""
    return [f"{curve.label}: {_bend(curve)}" for curve in curves]


def _bend(curve: Curve) -> str:
    last = curve.points[-1].cluster.num_devices
    if curve.bend is None:
        devices = counted(last, "GPU")
        return f"throughput per GPU falls by less than 5 % up to {devices}. {_gathers(curve)}"
    best, bent = curve.bend
    share = bent.step.tokens_per_second / best.step.tokens_per_second
    end = curve.points[-1].step.tokens_per_second / best.step.tokens_per_second
    cause = _largest_cost(best.step.breakdown, bent.step.breakdown)
    more = "" if bent is curve.points[-1] else f" On {last:,}, it is {end:.0%}."
    return (
        f"on {counted(bent.cluster.num_devices, 'GPU')}, throughput per GPU is {share:.0%} of that "
        f"on {best.cluster.num_devices:,}: {cause} per step.{more} {_gathers(curve)}"
    )


def _gathers(curve: Curve) -> str:
    """Describe how the time to gather a block grows along a curve."""
    first, last = curve.gathers[0], curve.gathers[-1]
    if not last.seconds:  # whole parameters, or shards of one rank
        return "Nothing is gathered."
    times = [
        f"{seconds_text(gather.seconds)} on {counted(point.cluster.num_devices, 'GPU')}"
        for gather, point in ((first, curve.points[0]), (last, curve.points[-1]))
    ]
    return (
        f"The gather of a block ({bytes_text(last.num_bytes)}) takes {' and '.join(times)}; "
        f"{last.latency_seconds / last.seconds:.0%} of the latter is latency between ranks."
    )
