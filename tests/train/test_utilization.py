import pytest
import torch

from shardwise.train import utilization
from shardwise.train.utilization import (
    RankFigures,
    StepsOfRun,
    flops_per_token,
    peak_flops,
    wait_metrics,
)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utilization, "name_of", lambda _device: name)
    assert peak_flops(torch.device("cpu"), "bfloat16") == peak
    assert peak_flops(torch.device("cpu"), "float32") is None


def test_flops_are_those_of_matrices_and_attention() -> None:
    attention = 12 * 2 * 64 * 32
    assert flops_per_token(1000, 1000, num_layers=2, width=64, context=32) == 6000 + attention
    assert flops_per_token(1000, 10, num_layers=2, width=64, context=32) == 4020 + attention


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    ranks = [RankFigures(seconds, 0, 0) for seconds in (0.4, 0.1, 0.4)]
    assert wait_metrics(ranks) == {"exposed_seconds": pytest.approx(0.3), "slowest_rank": 1}


def test_steps_of_a_run_have_several_passes() -> None:
    chosen = StepsOfRun((11, 12), first=11, num_passes=2)
    assert [step for step in range(9) if step in chosen] == [0, 1, 2, 3]
    some = StepsOfRun("some", first=11, num_passes=2)
    assert [step for step in range(30) if step in some] == list(range(6, 16))
