"""``python -m benchmarks.gpu`` on a CPU: both engines train and are reported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import main
from benchmarks.gpu_figures import summarize
from benchmarks.gpu_models import MODELS

from tests.forked import CONTEXT, choose_imports_of_server
from tests.pooled import run_on_pool

TINY = ["--device", "cpu", "--models", "tiny", "--steps", "2"]


def test_both_engines_train_as_one_of_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_imports_of_server()
    monkeypatch.setattr("benchmarks.gpu.get_context", lambda _: CONTEXT)  # which has torch
    out = tmp_path / "gpu.json"
    main([*TINY, "--ranks", "8", "--rounds", "1", "--out", str(out)])
    assert "no network is involved" in capsys.readouterr().out
    results = json.loads(out.read_text(encoding="utf-8"))
    tasks = results["tasks"].values()
    assert [(task["engine"], task["ranks"]) for task in tasks] == [("fsdp2", 8), ("shardwise", 8)]
    for medians in results["rows"].values():
        assert medians["tokens_per_second"] > 0
        assert medians["flops"] == products_of_tiny()


def products_of_tiny() -> int:
    """FLOP of a step, without attention's."""
    model, width, blocks = MODELS["tiny"], 64, 2
    of_blocks = blocks * 12 * width**2 * 2 * model.tokens  # forward
    head = model.vocabulary * width * 2 * model.tokens
    # Forward, recomputation, and twice that in backward. A block's last product is not recomputed,
    # because backward does not need its result; nor is the head's.
    return 4 * of_blocks - of_blocks // 3 + 3 * head


def test_both_engines_train_on_real_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.run_on_local_ranks", run_on_pool)
    out = tmp_path / "ranks.json"
    main([*TINY, "--nproc", "2", "--rounds", "2", "--out", str(out)])
    assert "2 ranks on cpu, gloo" in capsys.readouterr().out
    results = json.loads(out.read_text(encoding="utf-8"))
    fsdp2, ours = (results["rows"][f"tiny: {engine}"] for engine in ("fsdp2", "shardwise"))
    assert fsdp2["ratio"]["median"] == 1.0
    assert ours["ratio"]["median"] > 0
    assert ours["loss"] == pytest.approx(fsdp2["loss"], abs=0.01)
    assert 0 < ours["sent_bytes"] <= fsdp2["sent_bytes"]
    assert ours["collectives"] > 0
    assert fsdp2["collectives"] > 0


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    figures = summarize(
        [
            event("ncclDevKernel_AllGather", 0, 10),
            event("gemm", 4, 8),
            event("elementwise", 7, 9),
            event("Memset (Device)", 20, 21),
            event("ncclDevKernel_ReduceScatter", 20, 30),
            event("Memcpy PtoP (Device -> Device)", 28, 32),
            event("nccl:_all_gather_base", 0, 10, is_user_annotation=True),
            event("cudaStreamSynchronize", 0, 10, on_device=False),
            event("cudaDeviceSynchronize", 0, 10, on_device=False),
            event("cudaLaunchKernel", 0, 10, on_device=False),
        ]
    )
    assert figures["communication_seconds"] == pytest.approx(22e-6)
    assert figures["exposed_seconds"] == pytest.approx(16e-6)
    assert figures["kernel_launches"] == 4
    assert figures["host_waits"] == 1


def event(
    name: str, begin: int, end: int, *, on_device: bool = True, is_user_annotation: bool = False
) -> Any:
    """As torch's profiler has them; times are in microseconds."""
    kinds: Any = torch.autograd.DeviceType  # type: ignore[attr-defined]
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=end),
        device_type=kinds.CUDA if on_device else kinds.CPU,
        is_user_annotation=is_user_annotation,
    )


def test_events_of_the_profiler_can_be_summarized() -> None:
    with torch.profiler.profile() as seen:
        torch.ones(4) @ torch.ones(4)
    assert seen.events()
    assert summarize(seen.events() or ())["kernel_launches"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_error_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu --models tiny" in capsys.readouterr().err
