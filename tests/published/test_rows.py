import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.published.__main__ import ROWS
from benchmarks.published.configurations import (
    UnscoredError,
    assumptions_of,
    checkpointings_of,
    configuration_of,
    is_flash1,
    machine_of,
    shape_of,
)
from benchmarks.published.rows import read_rows

from shardwise.errors import ConfigError
from tests.published.rows import ROW, row_with, write


def read(tmp_path: Path, changes: dict[str, Any]) -> Any:
    return read_rows(write(tmp_path, row_with(changes)))[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.layers", -4, "greater than or equal to 1, got -4"),
        ("model.layers", "many", "valid integer, got 'many'"),
        ("model.layers", True, "valid integer, got True"),
        ("model.heads", 7, "expected a divisor of hidden=1024, got 7"),
        ("model.kv_heads", 3, "expected a divisor of heads=8, got 3"),
        ("model.seq", 0, "greater than or equal to 1, got 0"),
        ("model.arch", "rnn", "got 'rnn'"),
        ("strategy.sharding", "fulll_shard", "got 'fulll_shard'"),
        ("strategy.tp", 3, "expected a divisor of heads=8, got 3"),
        ("strategy.cp", 0, "greater than or equal to 1"),
        ("gpu", "A1000", "'A1000' is not known; did you mean 'A100'"),
        ("gpus", 63, "expected shard_group x replicas x tp x pp"),
        ("micro_batch", 2.5, "valid integer"),
        ("global_batch", 511, "= 512, got 511"),
        ("activation_checkpointing", "some", "got 'some'"),
        ("outcome", "oom", "expected null for a run that ran out of memory"),
        ("measured.mfu", 50.0, "less than or equal to 1, got 50.0"),
        ("measured.tokens_per_s_per_gpu", -1, "greater than 0, got -1"),
        ("measured.tokens_per_s_per_gpu", float("nan"), "finite number"),
        ("measured.step_s", 100.0, "tokens in 100.0 s are"),
        ("definition.peak_tflops_used", "fast", "valid number, got 'fast'"),
        ("interconnect.inter_node_gbps_per_node", 0, "greater than 0, got 0"),
    ],
)
def test_invalid_values_are_errors_that_name_the_row_and_the_field(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="row 'example-7b-64': ") as raised:
        read(tmp_path, {field: value})
    named = {"strategy.tp": ("strategy.tp", "gpus"), "outcome": ("measured.",)}
    assert any(f": {name}" in str(raised.value) for name in named.get(field, (field,)))
    if field != "strategy.tp":
        assert message in str(raised.value)


def test_a_missing_gpu_and_a_repeated_row_are_errors(tmp_path: Path) -> None:
    row = row_with({})
    del row["gpu"]
    with pytest.raises(ConfigError, match="gpu: field required, got nothing"):
        read_rows(write(tmp_path, row))
    with pytest.raises(ConfigError, match="id: row 0 has the same id"):
        read_rows(write(tmp_path, ROW, ROW))
    with pytest.raises(ConfigError, match="row 'number 0'"):
        read_rows(write(tmp_path, row_with({"id": ""})))


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"row": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="rows"):
        read_rows(path)


def test_a_row_becomes_a_configuration(tmp_path: Path) -> None:
    row = read(tmp_path, {})
    found = configuration_of(row)
    assert (found.strategy, found.shard_size, found.replicas) == ("fsdp", 64, 1)
    assert (found.micro_batch, found.accumulation, found.sequence) == (4, 2, 2048)
    assert (found.master_dtype, found.compute_dtype) == (torch.float32, torch.bfloat16)
    assert (found.reduce_dtype, found.stack) == (torch.float32, "fsdp1")
    assert found.world_size == row.cluster().num_devices == 64
    assert found.global_batch == row.global_batch
    shape = shape_of(row)
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.positions) == (4, 1024, 4, 0)


def test_degrees_and_strategies_of_rows(tmp_path: Path) -> None:
    hybrid = {"strategy.shard_group": 8, "strategy.replicas": 8}
    assert configuration_of(read(tmp_path, hybrid)).strategy == "hsdp"
    context = configuration_of(read(tmp_path, {"strategy.cp": 2, "global_batch": 256}))
    assert (context.shard_size, context.context, context.world_size) == (32, 2, 64)
    replicated = configuration_of(read(tmp_path, {"strategy.sharding": "ddp"}))
    assert (replicated.shard_size, replicated.replicas) == (1, 64)


def test_frameworks_imply_settings(tmp_path: Path) -> None:
    assert configuration_of(read(tmp_path, {"framework": "MaxText (JAX/XLA)"})).compiled
    old = read(tmp_path, {"framework": "llm-foundry/Composer (PyTorch FSDP1)"})
    assert is_flash1(old)
    usual = machine_of(read(tmp_path, {})).constants
    assert machine_of(old).constants.flash_forward == usual.flash_forward * usual.flash1
    every = {
        "activation_checkpointing": "selective",
        "activation_checkpointing_detail": "checkpoint every n-th block; n not stated",
    }
    assert checkpointings_of(read(tmp_path, every)) == [("none", "full", "none", "full")]
    unknown = checkpointings_of(read(tmp_path, {"activation_checkpointing": None}))
    assert unknown[0] == "none"
    assert unknown[-1] == "full"
    pure = configuration_of(read(tmp_path, {"precision": "bf16 (params, grads, states)"}))
    assert pure.master_dtype == pure.reduce_dtype == torch.bfloat16


NULL = {
    "optimizer": "the optimizer is AdamW",
    "precision": "the precision is bf16 mixed",
    "micro_batch": "micro-batches divide the global batch",
    "strategy.shard_group": "shards are on all data-parallel ranks",
    "activation_checkpointing": "checkpointing is the least that fits",
    "attention": "attention is fused",
}


@pytest.mark.parametrize("field", NULL)
@pytest.mark.parametrize("is_missing", [False, True])
def test_what_is_not_published_is_assumed_and_said(
    field: str, is_missing: bool, tmp_path: Path
) -> None:
    given = row_with({field: None})
    if is_missing:
        section, _, name = field.rpartition(".")
        del (given[section] if section else given)[name]
    [row] = read_rows(write(tmp_path, given))
    assert configuration_of(row) == configuration_of(read(tmp_path, {}))
    [assumption] = assumptions_of(row)
    assert assumption.startswith(NULL[field])


def test_a_batch_that_is_not_published_has_one_sequence(tmp_path: Path) -> None:
    row = read(tmp_path, {"micro_batch": None, "global_batch": None})
    assert configuration_of(row).micro_batch == 1
    assert assumptions_of(row) == ["a micro-batch has 1 sequence"]
    assert not assumptions_of(read(tmp_path, {}))


def test_the_committed_rows_have_sources_and_are_predicted_or_have_a_reason() -> None:
    entries = json.loads(ROWS.read_text("utf-8"))["rows"]
    rows = read_rows(ROWS)
    assert len(rows) == len(entries) == 181
    assert all(entry["source"]["title"] for entry in entries)
    reasons = set()
    for row in rows:
        try:
            assert configuration_of(row).world_size == row.gpus
            assert shape_of(row).layers
        except UnscoredError as error:
            reasons.add(str(error))
    assert reasons
