"""The page of `shardwise plan`."""

from collections.abc import Iterable
from html import escape

from shardwise.forecast.forecast import Forecast
from shardwise.forecast.view.planning import Planned
from shardwise.forecast.view.text import (
    DEFINITIONS,
    describe,
    reasons,
    scaling_text,
    settings_texts,
    with_device_word,
)
from shardwise.page.charts import Chart, Series
from shardwise.page.document import Drawing, document
from shardwise.page.formatting import NOTHING, bytes_text, cell, figure_tiles, seconds_text, table
from shardwise.page.timeline import Timeline

__all__ = ["render_plan"]

_COLUMNS = (
    "", "Sharding", "Micro-batches", "Checkpointing", "On the host", "Prefetch", "Step",
    "Tokens/s per GPU", "MFU", "HFU", "Exposed", "Memory", "Host memory", "Memory short by",
)  # fmt: skip


def render_plan(planned: Planned) -> str:
    """Render the page as HTML."""
    recording = planned.recording
    last = recording.steps[-1].step
    text = document(
        "plan",
        Drawing([Timeline(recording)], [last], _charts(planned)),
        title=planned.title,
        facts=planned.facts,
        sections={
            "why": "Why",
            "use": "Use it",
            "compared": "Configurations",
            "curves": "Curves",
            "timeline": "Timeline",
            "memory": "Memory",
            "definitions": "Definitions",
        },
        tiles=_tiles(planned),
        winner=escape(describe(planned.winner.configuration)),
        reasons="".join(
            f"<li>{escape(line)}</li>"
            for line in filter(None, (planned.shortage, *reasons(planned.ranking)))
        ),
        call=escape(planned.call),
        config=escape(planned.config or f"# {planned.config_problem}"),
        candidates=_candidates(planned),
        scaling="<br>".join(map(escape, scaling_text(planned.curves))),
        definitions="".join(
            f"<dt>{escape(name)}</dt><dd>{escape(definition)}</dd>"
            for name, definition in DEFINITIONS.items()
        ),
    )
    return with_device_word(planned.winner.cluster, text)


def _tiles(planned: Planned) -> str:
    winner = planned.winner
    step, memory = winner.step, winner.memory
    share = step.exposed_seconds / step.seconds
    available = bytes_text(winner.cluster.accelerator.memory_bytes)
    budget = planned.budget.summary(winner)
    return figure_tiles(
        [
            ("Throughput", f"{step.tokens_per_second:,.0f}", "tokens/s per GPU"),
            ("MFU", f"{step.mfu:.1%}", f"HFU {step.hfu:.1%}"),
            (
                "Step",
                seconds_text(step.seconds),
                f"{winner.tokens_per_second:,.0f} tokens/s in total",
            ),
            ("Exposed", seconds_text(step.exposed_seconds), f"{share:.1%} of a step"),
            (
                "Memory",
                bytes_text(memory.device_bytes),
                f"of {available}; peak at {memory.peak.label}",
            ),
            *([("Training", budget.split(" (")[0], budget)] if budget else []),
        ]
    )


def _candidates(planned: Planned) -> str:
    caption = "Configurations that fit, best first, followed by those that do not fit"
    rows = (*planned.ranking.fitting, *planned.ranking.too_large)
    return table(
        "candidates",
        caption,
        _COLUMNS,
        (_row(number, forecast) for number, forecast in enumerate(rows, 1)),
    )


def _row(number: int, forecast: Forecast) -> str:
    configuration, memory = forecast.configuration, forecast.memory
    name = escape(describe(configuration))
    prefetch, micro_batch = configuration.prefetch, configuration.micro_batch
    keys = (configuration.shard_ranks, micro_batch, number, number, prefetch)  # to sort by
    return (
        f'<tr data-name="{name}"{"" if forecast.fits else " class=short"}>'
        f'<th scope="row" data-value="{number}">{number}</th>'
        + "".join(map(cell, keys, map(escape, settings_texts(configuration))))
        + _time_cells(forecast)
        + cell(memory.device_bytes, bytes_text(memory.device_bytes))
        + cell(memory.host_bytes, bytes_text(memory.host_bytes))
        + cell(
            max(0, forecast.missing_bytes),
            "" if forecast.fits else bytes_text(forecast.missing_bytes),
        )
        + "</tr>"
    )


def _time_cells(forecast: Forecast) -> str:
    step = forecast.time
    if step is None:
        return cell(0, NOTHING) * 5
    return (
        cell(step.seconds, seconds_text(step.seconds))
        + cell(step.tokens_per_second, f"{step.tokens_per_second:,.0f}")
        + cell(step.mfu, f"{step.mfu:.1%}")
        + cell(step.hfu, f"{step.hfu:.1%}")
        + cell(step.exposed_seconds, seconds_text(step.exposed_seconds), "exposed")
    )


def _charts(planned: Planned) -> list[Chart]:
    charts = [
        Chart(
            "Memory and time",
            "tokens/s",
            [*_by_strategy(planned), _points("frontier", planned.frontier, joined=True)],
            x_name="memory per GPU",
            x_unit="bytes",
            limit=planned.winner.cluster.accelerator.memory_bytes,
            note="tokens/s per GPU by memory used; dashed: a GPU's memory",
        )
    ]
    if planned.curves:
        charts.append(
            Chart(
                "Scaling",
                "tokens/s",
                [
                    Series(
                        curve.label,
                        [float(point.cluster.num_devices) for point in curve.points],
                        [point.step.tokens_per_second for point in curve.points],
                    )
                    for curve in planned.curves
                ],
                x_name="GPUs",
                log_x=True,
                note="tokens/s per GPU by the number of GPUs, with constant work per GPU",
            )
        )
    return charts


def _by_strategy(planned: Planned) -> list[Series]:
    groups: dict[str, list[Forecast]] = {}
    for forecast in planned.ranking.fitting:
        groups.setdefault(forecast.configuration.strategy, []).append(forecast)
    return [_points(name, group) for name, group in groups.items()]


def _points(label: str, found: Iterable[Forecast], *, joined: bool = False) -> Series:
    shown = sorted(found, key=lambda forecast: forecast.memory.device_bytes)
    return Series(
        label,
        [float(forecast.memory.device_bytes) for forecast in shown],
        [forecast.step.tokens_per_second for forecast in shown],
        [describe(forecast.configuration) for forecast in shown],
        joined,
    )
