"""``python -m benchmarks.gpu`` on a CPU: both engines train and are reported."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import MODELS, main

from tests.forked import CONTEXT, choose_imports_of_server


def test_both_engines_train_as_one_of_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_imports_of_server()
    monkeypatch.setattr("benchmarks.gpu.get_context", lambda _: CONTEXT)  # which has torch
    out = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--models", "tiny", "--ranks", "8", "--steps", "2", "--rounds", "1"]
    main([*words, "--out", str(out)])
    assert "no network is in it" in capsys.readouterr().out
    results = json.loads(out.read_text(encoding="utf-8"))
    tasks = results["tasks"].values()
    assert [(task["engine"], task["ranks"]) for task in tasks] == [("fsdp2", 8), ("shardwise", 8)]
    for medians in results["rows"].values():
        assert medians["tokens_per_second"] > 0
        assert medians["flops"] == products_of_tiny()


def products_of_tiny() -> int:
    """FLOP of a step, without attention's."""
    model, width, blocks = MODELS["tiny"], 64, 2
    tokens = model.batch * model.context
    of_blocks = blocks * 12 * width**2 * 2 * tokens  # forward
    head = model.vocabulary * width * 2 * tokens
    # Forward, recomputation, and twice that in backward. A block's last product is not recomputed,
    # because backward does not need its result; nor is the head's.
    return 4 * of_blocks - of_blocks // 3 + 3 * head


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_error_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu --models tiny" in capsys.readouterr().err
