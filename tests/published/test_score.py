from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.published.score import Errors, Score, is_held_out, score

from shardwise.errors import ConfigError
from tests.published.rows import row_with, write

OOM = {
    "outcome": "oom",
    "micro_batch": 2048,
    "global_batch": 262_144,
    **{f"measured.{name}": None for name in ("mfu", "tokens_per_s_per_gpu", "peak_mem_gib")},
}
ROWS = [
    row_with({}),
    row_with({"id": "double", "measured.tokens_per_s_per_gpu": 200_000}),
    row_with({"id": "by-tflops", "family": "other", "measured.tokens_per_s_per_gpu": None}),
    row_with({"id": "too-large", **OOM}),
    row_with({"id": "adapted", "adapter": "LoRA", "scope": "extended"}),
    row_with({"id": "old", "attention": "unfused"}),
    row_with({"id": "unknown", "gpus": None, "scope": "extended"}),
]
ROWS[2]["measured"]["tflops_per_gpu"] = 100.0


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Score:
    return score(write(tmp_path_factory.mktemp("score"), *ROWS))


def test_every_row_is_predicted_or_has_a_reason(scored: Score) -> None:
    by_id = {one.row.id: one for one in scored.predictions}
    assert list(by_id) == [row["id"] for row in ROWS]
    assert by_id["unknown"].reason == "the number of GPUs is not published"
    assert by_id["unknown"].error is None
    assert by_id["adapted"].error is not None
    first, double = by_id["example-7b-64"], by_id["double"]
    assert first.error is not None
    assert double.error == pytest.approx((first.error + 1) / 2 - 1)
    assert first.memory_error is not None
    assert first.fits is True
    assert by_id["too-large"].fits is False


def test_predictions_are_in_the_units_of_the_row(scored: Score) -> None:
    one = scored.predictions[2]
    per_token = 6 * 100_000_000 + 12 * 4 * 1024 * 2048  # as the row counts FLOPs
    assert one.tflops == pytest.approx(one.tokens_per_second * per_token / 1e12)
    assert one.mfu == pytest.approx(one.tflops / 312)
    assert one.error == pytest.approx(one.tflops / 100.0 - 1)


def test_the_table_separates_legacy_stacks_and_names_the_worst_family(scored: Score) -> None:
    families = {one.name: len(one.values) for one in scored.families(lambda one: one.counts)}
    assert families == {"example": 2, "other": 1}
    legacy = scored.throughput("legacy", lambda one: one.row.is_legacy)
    assert legacy is not None
    assert len(legacy.values) == 1
    assert scored.verdicts == (4, 4)
    text = scored.text()
    assert "worst family: " in text
    assert "legacy stacks" in text
    assert "6 N D at 40 % of the peak" in text
    assert "  unknown: the number of GPUs is not published" in text


def test_errors_of_some_rows() -> None:
    errors = Errors("some", (-0.1, 0.05, 0.3))
    assert (errors.median, errors.bias) == (0.1, 0.05)
    assert errors.share_close == pytest.approx(2 / 3)


def test_a_quarter_of_the_rows_is_held_out() -> None:
    rows: Any = (SimpleNamespace(id=f"row-{number}") for number in range(1000))
    assert 200 < sum(map(is_held_out, rows)) < 300


def test_invalid_rows_are_refused_before_any_row_is_predicted(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS, row_with({"id": "wrong", "model.layers": -1}))
    with pytest.raises(ConfigError, match=r"row 'wrong': model\.layers: "):
        score(path, progress=lambda _row: pytest.fail("a row was predicted"))
