"""Published measurements: a file of rows, each a training run and its results.

A file is ``{"schema": ..., "about": ..., "rows": [...]}``. A field that is null or missing was not
published. All rows are validated before any is predicted, so that invalid rows are errors and not
wrong numbers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import ConfigError
from shardwise.forecast.machines.hardware import Cluster, accelerator

__all__ = ["Definition", "Measured", "Row", "Sharding", "read_rows"]

_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class RowModel(_Strict):
    """``model`` of a row."""

    name: _Text
    arch: Literal["gpt", "llama", "t5", "bert", "moe", "vit"]
    layers: _Count | None = None
    hidden: _Count | None = None
    heads: _Count | None = None
    kv_heads: _Count | None = None
    ffn: _Count | None = None
    ffn_kind: _Text | None = None
    vocab: _Count | None = None
    seq: _Count | None = None
    params: _Count | None = None
    tied_embeddings: bool | None = None


class Sharding(_Strict):
    """``strategy`` of a row."""

    sharding: Literal[
        "full_shard", "shard_grad_op", "hybrid_shard", "zero1", "zero2", "zero3", "ddp", "none"
    ]
    shard_group: _Count | None = None  # includes the ranks of context parallelism
    replicas: _Count | None = None
    reshard_after_forward: bool | None = None
    tp: _Count = 1
    pp: _Count = 1
    cp: _Count = 1
    ep: _Count = 1


class Network(_Strict):
    """``interconnect`` of a row."""

    inter_node_gbps_per_node: _Positive | None = None


class Measured(_Strict):
    """The results of a run."""

    tokens_per_s_per_gpu: _Positive | None = None
    step_s: _Positive | None = None
    tflops_per_gpu: _Positive | None = None
    mfu: _Share | None = None
    hfu: _Share | None = None
    peak_mem_gib: _Positive | None = None
    peak_active_gib: _Positive | None = None


class Definition(_Strict):
    """How the FLOPs and memory of a row were counted."""

    flops_formula: str | None = None
    includes_recompute: bool | None = None
    attention_flops: _Text | None = None
    peak_tflops_used: _Positive | None = None
    memory_metric: str | None = None


class Row(_Strict):
    """One run."""

    id: _Text
    family: _Text
    scope: Literal["core", "extended"]
    model: RowModel
    framework: _Text
    strategy: Sharding
    gpu: _Text
    gpus: _Count | None = None
    gpus_per_node: _Count | None = None
    interconnect: Network = Network()
    micro_batch: _Count | None = None
    grad_accumulation: _Count | None = None
    global_batch: _Count | None = None
    precision: _Text | None = None
    optimizer: _Text | None = None
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    activation_checkpointing_detail: str | None = None
    offload: str | None = None
    compile: bool | None = None
    attention: _Text | None = None
    adapter: str | None = None
    outcome: Literal["ok", "oom"]
    measured: Measured = Measured()
    definition: Definition = Definition()
    config_complete: bool = True
    notes: str | None = None

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that train on their own sequences; all sizes must be known."""
        assert self.gpus is not None
        return self.gpus // (self.strategy.tp * self.strategy.pp * self.strategy.cp)

    @property
    def is_legacy(self) -> bool:
        """Whether its software is older than fused attention."""
        return (self.attention or "").startswith("unfused")

    def cluster(self) -> Cluster:
        """Return the cluster that it ran on, with the usual network if none was published."""
        assert self.gpus is not None
        network = self.interconnect.inter_node_gbps_per_node
        return Cluster.of(self.gpu, self.gpus, self.gpus_per_node, network)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read all rows of a file.

    Raises:
        ConfigError: the file cannot be read, or a field of a row is invalid.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected a JSON file with published measurements, "
            f'an object with a list "rows": {error}'
        ) from error
    if not isinstance(entries, list):
        raise ConfigError(f'{path}: "rows": expected a list, got {type(entries).__name__}')
    rows = tuple(_row(entry, number) for number, entry in enumerate(entries))
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.id in first:
            _refuse(row.id, "id", f"row {first[row.id]} has the same id; expected a unique id")
        first[row.id] = number
    return rows


def _row(entry: object, number: int) -> Row:
    name = entry.get("id") if isinstance(entry, Mapping) else None
    label = name if isinstance(name, str) and name else f"number {number}"
    try:
        row = Row.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        _refuse(label, field, f"{first['msg'].lower()}, got {_shown(first)}")
    for field, problem in _contradictions(row):
        _refuse(label, field, problem)
    return row


def _shown(error: Mapping[str, Any]) -> str:
    return "nothing" if error["type"] == "missing" else repr(error["input"])[:80]


def _refuse(row: str, field: str, problem: str) -> NoReturn:
    raise ConfigError(f"row {row!r}: {field}: {problem}")


def _contradictions(row: Row) -> Iterator[tuple[str, str]]:
    """Yield fields that contradict others, and the problem."""
    try:
        accelerator(row.gpu)
    except ConfigError as error:
        yield "gpu", str(error)
    yield from _rank_problems(row)
    yield from _shape_problems(row)
    yield from _batch_problems(row)
    yield from _result_problems(row)


def _rank_problems(row: Row) -> Iterator[tuple[str, str]]:
    sharding = row.strategy
    if row.gpus is None or sharding.shard_group is None or sharding.replicas is None:
        return
    ranks = sharding.shard_group * sharding.replicas * sharding.tp * sharding.pp
    if row.gpus not in (ranks, ranks * sharding.cp):
        problem = (
            f"expected shard_group x replicas x tp x pp (x cp) = {sharding.shard_group} x "
            f"{sharding.replicas} x {sharding.tp} x {sharding.pp} (x {sharding.cp}), got {row.gpus}"
        )
        yield "gpus", problem
    for field, size in (("cp", sharding.cp), ("ep", sharding.ep)):
        if row.gpus % (size * sharding.tp * sharding.pp):
            yield f"strategy.{field}", f"expected a divisor of {row.gpus} GPUs, got {size}"


def _shape_problems(row: Row) -> Iterator[tuple[str, str]]:
    shape, ranks = row.model, row.strategy.tp
    for field, divisor, name, value in (
        ("model.heads", shape.heads, "hidden", shape.hidden),
        ("model.kv_heads", shape.kv_heads, "heads", shape.heads),
        ("strategy.tp", ranks, "heads", shape.heads),
        ("strategy.tp", ranks, "ffn", shape.ffn),
    ):
        if divisor and value and value % divisor:
            yield field, f"expected a divisor of {name}={value}, got {divisor}"


def _batch_problems(row: Row) -> Iterator[tuple[str, str]]:
    if None in (row.gpus, row.micro_batch, row.grad_accumulation, row.global_batch):
        return
    assert row.micro_batch is not None
    assert row.grad_accumulation is not None
    expected = row.micro_batch * row.grad_accumulation * row.data_parallel
    if row.global_batch != expected:
        problem = (
            f"expected micro_batch x grad_accumulation x data-parallel groups = {row.micro_batch} "
            f"x {row.grad_accumulation} x {row.data_parallel} = {expected}, got {row.global_batch}"
        )
        yield "global_batch", problem


def _result_problems(row: Row) -> Iterator[tuple[str, str]]:
    found = row.measured
    reached = [name for name in Measured.model_fields if getattr(found, name) is not None]
    if row.outcome == "oom" and reached:
        yield f"measured.{reached[0]}", "expected null for a run that ran out of memory"
    known = None not in (row.micro_batch, row.grad_accumulation, row.model.seq, row.gpus)
    if found.step_s is None or found.tokens_per_s_per_gpu is None or not known:
        return
    tokens = tokens_of(row)
    rate = tokens / found.step_s / (row.gpus or 1)
    if not 1 / _CONSISTENT < rate / found.tokens_per_s_per_gpu < _CONSISTENT:
        problem = (
            f"{tokens} tokens in {found.step_s} s are {rate:.0f} tokens/s per GPU, but "
            f"tokens_per_s_per_gpu is {found.tokens_per_s_per_gpu:.0f}"
        )
        yield "measured.step_s", problem


_CONSISTENT = 3.0  # factor; published step times are rounded or from other steps


def tokens_of(row: Row) -> int:
    """Return the tokens per step over all ranks, for a row with a known batch."""
    assert row.micro_batch is not None
    assert row.model.seq is not None
    return row.micro_batch * (row.grad_accumulation or 1) * row.data_parallel * row.model.seq
