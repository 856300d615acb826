"""``shardwise verify`` exits with 0 if all is equal, 1 if something differs, 2 on usage errors."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.plan.strategy import STRATEGIES
from tests.pooled import run_on_pool

from .commands import fail

OWN = """
import torch
from torch import nn

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def subject():
    return (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2))),
        lambda step: torch.randn(6, 5),
        lambda model, batch: model(batch).square().mean(),
    )
"""
USAGE_ERRORS = {
    "gtp": "gtp: expected one of gpt, moe, encoder-decoder, conv, lora, bert, gpt2, llama, "
    "mixtral, qwen2, t5, vit, hf; did you mean 'gpt'?",
    "own.py:subjects": "own.py has no function 'subjects'",
    "--strategies zero9": "strategy='zero9': expected one of",
    "--steps 0": "--steps 0: expected 1 or more",
    "--steps two": "Invalid value for '--steps'",
    "--nproc 0": "--nproc 0: expected 1 or more ranks",
    "--corrupt head.weight": "--corrupt head.weight: name the MODEL",
    "--frobnicate": "No such option: --frobnicate",
    "--optimizer adamax": "adamax: expected one of adamw, adam, nadam, radam",
    "--granularity rows": "--granularity rows: expected one of element, row, tensor, dim",
    "--tolerance -1": "--tolerance -1.0: expected 0 or more",
    "--wire gather=int8": "--wire gather=int8: quantized values differ from one process by up "
    "to 1/254 (int8), 1/16 (fp8) or 1/14 (int4) of the largest value in their block; pass "
    "--tolerance. With block=8 and --optimizer sgd, 0.5 is enough for int8 and fp8, and for int4 "
    "in reductions",
    "--wire int8": "--wire int8: expected one or more of gather=, reduce=, block=, "
    "ranks_per_host=, error_feedback=, such as gather=int8,reduce=int4; got 'int8'",
    "--wire gather=int7 --tolerance 1": "Wire(gather='int7'): expected one of int8, int4, fp8",
    "--wire gather=int8 --engine ddp": "--wire gather=int8: other engines do not use it",
}


def thorough(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.thorough)


@pytest.fixture(autouse=True)
def _ranks_of_a_pool(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Commands in this process start no ranks."""
    monkeypatch.setattr("shardwise.cli.run_verify.run_on_local_ranks", run_on_pool)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt", ["GPT"]),
        pytest.param(
            "",
            ["GPT", "MixtureOfExperts", "EncoderDecoder", "ConvNet", "Adapted"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_built_in_models_are_equal_on_two_ranks(
    model: str, names: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *model.split()]) == 0
    shown = capfd.readouterr().out.split("\n\n")[:-1]
    assert [table.split(",")[0] for table in shown] == names
    for table in shown:
        title, _, *rows = table.splitlines()
        assert "2 ranks against one process" in title
        assert [row.split()[0] for row in rows] == list(
            dict.fromkeys(strategy.name for strategy in STRATEGIES.values())
        )
        assert all(row.split()[4] == "equal" for row in rows)


@pytest.mark.parametrize("model", ["gpt", *(thorough(name) for name in ("moe", "conv", "lora"))])
@pytest.mark.parametrize("optimizer", ["muon", "adam8bit", "{own}/own.py:sgd", thorough("soap")])
def test_an_optimizer_equals_one_process(
    model: str, optimizer: str, own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer = optimizer.format(own=own)
    arguments = ["--optimizer", optimizer, "--strategies", "hsdp,fsdp", "--steps", "3"]
    assert main(["verify", model, *arguments]) == 0
    rows = capfd.readouterr().out.splitlines()[2:4]
    assert [row.split()[4] for row in rows] == ["equal"] * 2


@pytest.mark.parametrize("model", ["gpt", *(thorough(name) for name in ("moe", "conv", "lora"))])
@pytest.mark.parametrize(
    "wire",
    [
        "gather=int8,reduce=int4,block=8,error_feedback=true",
        thorough("gather=fp8,reduce=int8,block=8,ranks_per_host=2"),
    ],
)
def test_a_wire_differs_by_its_rounding_alone(
    model: str, wire: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--optimizer", "sgd", "--tolerance", "0.5", "--strategies", "fsdp,hsdp,ddp"]
    assert main(["verify", model, "--wire", wire, *options, "--nproc", "4"]) == 0
    first, _, _, _, *rows = capfd.readouterr().out.splitlines()
    assert first == "Relative errors up to 0.5 count as equal."
    assert [row.split()[4] for row in rows[:3]] == ["equal"] * 3
    assert all(float(row.split()[2]) > 1e-4 for row in rows[:3])


def test_a_corrupted_gradient_is_named(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--corrupt", "1.0.bias", "--strategies", "fsdp, ddp", "--nproc", "3"]
    assert main(["verify", f"{own}/own.py:subject", *arguments]) == 1
    printed = capfd.readouterr()
    first, second = printed.err.splitlines()
    difference = "on 3 ranks differs from one process: the gradient of 1.0.bias in step 0 is off by"
    assert first.startswith(f"shardwise: Sequential with fsdp {difference}")
    assert second.startswith(f"Sequential with ddp {difference}")
    assert printed.out.count("DIFFERS  1.0.bias") == 2


def test_an_error_found_on_the_ranks_is_one_line(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = fail(capfd, ["verify", f"{own}/own.py:subject", "--nproc", "4"])
    assert line == (
        "shardwise: batch_fn(0) has 6 rows, which do not divide evenly over 4 ranks; "
        "return 4 or 8 rows"
    )


@pytest.mark.parametrize(("command_line", "message"), USAGE_ERRORS.items())
def test_an_error_is_one_line(
    command_line: str,
    message: str,
    own: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(own)
    assert message in fail(capfd, ["verify", *command_line.split()])
