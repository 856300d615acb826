"""Predictions of published measurements, and their errors.

A quarter of the rows, selected by a hash of their names, is held out: no constant of the package
was fitted on them. Errors are relative, for throughput and peak memory as each row defines them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import median

from benchmarks.published.configurations import (
    UnscoredError,
    assumptions_of,
    checkpointings_of,
    configuration_of,
    machine_of,
    shape_of,
)
from benchmarks.published.rows import Row, read_rows, tokens_of
from benchmarks.published.rules_of_thumb import Rule, memory_rule, roofline_tokens, six_nd_tokens
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster, Verdict
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.forecast.models.model import Model
from shardwise.forecast.time.step import StepTime, step_time
from shardwise.forecast.work import Workload

__all__ = ["Errors", "Prediction", "Score", "is_held_out", "score"]

_SEED = "2026"
_HELD_OUT = 4  # one row in four is held out
_GIB = 1 << 30
_TERA = 1e12
_CLOSE = 0.2  # relative error of the throughput
_MEMORY_CLOSE = 0.15  # relative error of the memory


def is_held_out(row: Row) -> bool:
    """Whether the row is held out: no constant was fitted on it."""
    return int(sha256((_SEED + row.id).encode()).hexdigest(), 16) % _HELD_OUT == 0


def is_float8(row: Row) -> bool:
    """Whether linear layers have 8-bit products."""
    return row.config_complete and any(word in (row.precision or "") for word in ("fp8", "float8"))


@dataclass(frozen=True)
class Prediction:
    """The prediction of a row, in the row's units."""

    row: Row
    reason: str = ""  # why the row is not predicted
    assumptions: tuple[str, ...] = ()  # for what is not published
    time: StepTime | None = None
    memory: Certificate | None = None
    peers: tuple[tuple[str, float], ...] = ()  # errors of rules of thumb, by name

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        assert self.time is not None
        return self.time.tokens_per_second

    @property
    def tflops(self) -> float:
        """TFLOP/s per device, with FLOPs counted as in the row."""
        return self.tokens_per_second * _flops_per_token(self.row) / _TERA

    @property
    def mfu(self) -> float:
        """MFU, with FLOPs counted as in the row and relative to the peak that it states."""
        stated = self.row.definition.peak_tflops_used
        peak = self.row.cluster().accelerator.peak_flops / _TERA
        return self.tflops / (stated or peak)

    @cached_property
    def error(self) -> float | None:
        """Error of the throughput; None if it was not measured."""
        measured = measured_tokens(self.row)
        if self.time is None or measured is None:
            return None
        return self.tokens_per_second / measured - 1.0

    @property
    def is_allocated(self) -> bool:
        """Whether the row measured tensors, and not what the allocator reserves."""
        metric = self.row.definition.memory_metric or ""
        return "allocated" in metric or "active" in metric

    @property
    def memory_bytes(self) -> int:
        """Memory in the metric of the row."""
        assert self.memory is not None
        metric = self.row.definition.memory_metric or ""
        if self.is_allocated:
            return self.memory.peak_bytes
        return self.memory.device_bytes if "device" in metric else self.memory.reserved_bytes

    @cached_property
    def memory_error(self) -> float | None:
        """Error of the peak memory; None if it was not measured."""
        measured = self.row.measured.peak_mem_gib
        if self.memory is None or measured is None:
            return None
        return self.memory_bytes / _GIB / measured - 1.0

    @property
    def fits(self) -> bool | None:
        """Whether the run is predicted to fit; None if it is not predicted."""
        if self.memory is None:
            return None
        return self.memory.device_bytes <= self.row.cluster().accelerator.memory_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the run is predicted to fit, or to be close."""
        assert self.memory is not None
        return Forecast(Configuration(), self.row.cluster(), self.memory).verdict

    @property
    def counts(self) -> bool:
        """Whether the row counts in the summary of errors."""
        return self.row.scope == "core" and not self.row.is_legacy


@dataclass(frozen=True)
class Errors:
    """The relative errors of some rows."""

    name: str
    values: tuple[float, ...]
    close: float = _CLOSE

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return median(map(abs, self.values))

    @property
    def bias(self) -> float:
        """Median of the signed errors; above 0 if predictions are too high."""
        return median(self.values)

    @property
    def share_close(self) -> float:
        """Share of rows with an error of at most ``close``."""
        return sum(abs(value) <= self.close for value in self.values) / len(self.values)


@dataclass(frozen=True)
class Score:
    """The predictions of all rows of a file."""

    predictions: tuple[Prediction, ...]

    def throughput(self, name: str, which: Callable[[Prediction], bool]) -> Errors | None:
        """Return throughput errors of some rows; None if there are none."""
        return _errors(name, (one.error for one in self.predictions if which(one)))

    def memory(self, name: str, which: Callable[[Prediction], bool]) -> Errors | None:
        """Return peak-memory errors of some rows; None if there are none."""
        found = (one.memory_error for one in self.predictions if which(one))
        return _errors(name, found, _MEMORY_CLOSE)

    def families(self, which: Callable[[Prediction], bool]) -> list[Errors]:
        """Return throughput errors by family, the worst first."""
        names = dict.fromkeys(one.row.family for one in self.predictions if which(one))
        found = (
            self.throughput(name, lambda one, name=name: which(one) and one.row.family == name)  # type: ignore[misc]
            for name in names
        )
        return sorted((one for one in found if one), key=lambda one: -one.median)

    @property
    def verdicts(self) -> tuple[int, int]:
        """Number of core rows whose fit is predicted correctly, and number of core rows."""
        known = [one for one in self.predictions if one.counts and one.fits is not None]
        return sum(one.fits == (one.row.outcome == "ok") for one in known), len(known)

    def peer(self, rule: str) -> Errors | None:
        """Return the errors of a rule of thumb on the core rows."""
        return _errors(rule, (dict(one.peers).get(rule) for one in self.predictions))

    def text(self) -> str:
        """Format errors of core rows by family, of other rows, and of rules of thumb."""
        return "\n".join(_lines(self))


def _errors(name: str, found: Iterable[float | None], close: float = _CLOSE) -> Errors | None:
    values = tuple(value for value in found if value is not None)
    return Errors(name, values, close) if values else None


def score(path: Path, *, progress: Callable[[Row], None] = lambda _row: None) -> Score:
    """Predict every row of a file of published measurements.

    Args:
        path: the file.
        progress: called before each row.

    Raises:
        ConfigError: a row is invalid.
    """
    predictor = _Predictor()
    found = []
    for row in read_rows(path):
        progress(row)
        found.append(predictor.predict(row))
    return Score(tuple(found))


class _Predictor:
    """Predicts rows; rows of one model share its plans and traces."""

    def __init__(self) -> None:
        self._forecasters: dict[Model, Forecaster] = {}

    def predict(self, row: Row) -> Prediction:
        try:
            return self._predicted(row, configuration_of(row), Model(row.model.name, shape_of(row)))
        except UnscoredError as error:
            return Prediction(row, str(error))

    def _predicted(self, row: Row, configuration: Configuration, model: Model) -> Prediction:
        machine = machine_of(row)
        forecaster = self._forecasters.setdefault(model, Forecaster(model, machine))
        plan = forecaster.plan(configuration, stage=0)
        for checkpointing in checkpointings_of(row):
            configuration = replace(configuration, checkpointing=checkpointing)
            try:
                workload = forecaster.workload(configuration, stage=0)
            except PlanError as error:  # the other rows are still predicted
                raise UnscoredError(f"it cannot be traced: {str(error).splitlines()[0]}") from error
            memory = memory_certificate(plan, workload, configuration)
            if memory.device_bytes <= row.cluster().accelerator.memory_bytes:
                break
        time = step_time(plan, workload, machine, configuration)
        found = Prediction(row, assumptions=tuple(assumptions_of(row)), time=time, memory=memory)
        return replace(found, peers=tuple(_rule_errors(found, workload, configuration)))


# -- what rows measure ---------------------------------------------------------------------------


def measured_tokens(row: Row) -> float | None:
    """Return tokens per second per GPU, measured directly or derived from TFLOP/s."""
    found = row.measured
    if found.tokens_per_s_per_gpu is not None:
        return found.tokens_per_s_per_gpu
    if found.tflops_per_gpu is not None and row.definition.flops_formula:
        return found.tflops_per_gpu * _TERA / _flops_per_token(row)
    if found.step_s is not None and None not in (row.micro_batch, row.model.seq, row.gpus):
        return tokens_of(row) / found.step_s / (row.gpus or 1)
    return None


def _flops_per_token(row: Row) -> float:
    """Return FLOPs per token as the row counts them.

    Rows differ in whether they count recomputation, all or the causal half of attention, and
    embeddings.
    """
    model, definition = row.model, row.definition
    layers, hidden, sequence = model.layers or 0, model.hidden or 0, model.seq or 0
    formula = definition.flops_formula or ""
    if formula.startswith("96"):  # Narayanan et al., 2021 (arXiv 2104.04473), section 3
        per_layer = 96 * hidden**2 * (1 + sequence / (6 * hidden))
        return layers * per_layer + 6 * (model.vocab or 0) * hidden
    parameters = model.params or 0
    if "N_embedding" in formula:
        parameters -= (model.vocab or 0) * hidden
    is_causal = (definition.attention_flops or "").startswith("causal")
    attention = 6 if is_causal else 12
    flops = 6 * parameters + attention * layers * hidden * sequence
    return flops * (4 / 3 if definition.includes_recompute else 1)


def _rule_errors(
    found: Prediction, workload: Workload, configuration: Configuration
) -> Iterable[tuple[str, float]]:
    row = found.row
    tokens = measured_tokens(row)
    device = row.cluster().accelerator
    if tokens is not None and found.counts:
        parameters = row.model.params or 0
        yield Rule.SIX_ND, six_nd_tokens(device, parameters) / tokens - 1
        yield Rule.ROOFLINE, roofline_tokens(device, workload) / tokens - 1
    measured = row.measured.peak_mem_gib
    if measured is not None and found.counts:
        model = row.model
        largest = (model.hidden or 0) * max(model.vocab or 0, model.ffn or 0)
        for rule, num_bytes in memory_rule(model.params or 0, largest, configuration):
            yield rule, num_bytes / _GIB / measured - 1


# -- the table -------------------------------------------------------------------------------------

_HEAD = f"{'':38}{'rows':>5}{'median':>9}{'bias':>9}{'within':>9}"


def _lines(score: Score) -> Iterable[str]:
    yield "Throughput: relative errors of core rows, and the share within 20 %"
    yield _HEAD
    families = score.families(lambda one: one.counts)
    yield from map(_line, families)
    for name, which in _PARTS:
        errors = score.throughput(name, which)
        if errors:
            yield _line(errors)
    if families:
        yield f"median of family medians: {median(one.median for one in families):.1%}"
        yield f"worst family: {families[0].name} ({families[0].median:.1%})"
    yield ""
    yield from _memory_lines(score)
    yield ""
    yield "Rules of thumb on the same rows"
    for rule in Rule:
        errors = score.peer(rule)
        if errors:
            yield _line(errors)
    yield from _assumed(score.predictions)
    yield from _unscored(score.predictions)


def _is_adapted_or_float8(one: Prediction) -> bool:
    return one.row.adapter is not None or is_float8(one.row)


_PARTS: Sequence[tuple[str, Callable[[Prediction], bool]]] = (
    ("all core rows", lambda one: one.counts),
    ("of these, fitted on", lambda one: one.counts and not is_held_out(one.row)),
    ("of these, held out", lambda one: one.counts and is_held_out(one.row)),
    ("legacy stacks (unfused attention)", lambda one: one.row.scope == "core" and not one.counts),
    ("extended rows", lambda one: one.row.scope == "extended" and one.row.config_complete),
    ("of these, adapters", lambda one: one.row.adapter is not None),
    ("of these, 8-bit products", lambda one: is_float8(one.row)),
    ("adapters or 8-bit products", _is_adapted_or_float8),
    ("of these, held out", lambda one: _is_adapted_or_float8(one) and is_held_out(one.row)),
    ("incomplete rows", lambda one: not one.row.config_complete),
)


_MEMORY_PARTS: Sequence[tuple[str, Callable[[Prediction], bool]]] = (
    ("all rows", lambda _one: True),
    ("of these, not held out", lambda one: not is_held_out(one.row)),
    ("of these, held out", lambda one: is_held_out(one.row)),
    ("core rows, fused attention", lambda one: one.counts),
    ("adapters", lambda one: one.row.adapter is not None),
    ("8-bit products", lambda one: is_float8(one.row)),
    ("legacy stacks (unfused attention)", lambda one: one.row.is_legacy),
)


def _line(errors: Errors) -> str:
    figures = f"{errors.median:>9.1%}{errors.bias:>+9.1%}{errors.share_close:>9.0%}"
    return f"{errors.name:38}{len(errors.values):>5}{figures}"


def _memory_lines(score: Score) -> Iterable[str]:
    yield "Memory: relative errors of rows with a measured peak, and the share within 15 %"
    for name, which in _MEMORY_PARTS:
        memory = score.memory(name, which)
        if memory:
            yield _line(memory)
    under = [one for one in score.predictions if one.is_allocated and one.memory_error is not None]
    if under:
        least = min(under, key=lambda one: one.memory_error or 0)
        yield f"most below an allocated peak: {least.row.id} ({least.memory_error:+.1%})"
    right, known = score.verdicts
    if known:
        yield f"correct predictions of whether a run fits: {right} of {known}"
    found = [one for one in score.predictions if one.memory is not None]
    clear = [one for one in found if one.verdict != Verdict.CLOSE]
    if clear:
        right = sum((one.verdict == Verdict.FITS) == (one.row.outcome == "ok") for one in clear)
        close = len(found) - len(clear)
        yield f"all rows: {right} of {len(clear)} clear verdicts are correct, {close} are close"


def _assumed(predictions: Sequence[Prediction]) -> Iterable[str]:
    counts = Counter(one for found in predictions for one in found.assumptions)
    if counts:
        yield ""
        yield "Assumed where it is not published"
    for assumption, count in counts.most_common():
        yield f"  {assumption}: {count} rows"


def _unscored(predictions: Sequence[Prediction]) -> Iterable[str]:
    reasons: dict[str, list[str]] = {}
    for one in predictions:
        if one.reason:
            reasons.setdefault(one.reason, []).append(one.row.id)
    if reasons:
        yield ""
        yield "Not predicted"
    for reason, rows in reasons.items():
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"  {rows[0]}{more}: {reason}"
