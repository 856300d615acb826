"""``shardwise plan``: its output, its files and its errors."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from shardwise.cli.plan import Progress
from shardwise.forecast.models.transformer import Shape, build
from tests.cli.planning import Result, run
from tests.report.chromium import find_chromium, open_browser

SHAPE = Shape(arch="gpt", layers=3, hidden=64, heads=2, vocab=512)


def small() -> nn.Module:
    """Build the model of these tests."""
    return build(SHAPE)


def huge() -> nn.Module:
    return build(Shape(arch="gpt", layers=2, hidden=1 << 17, heads=8, vocab=512))


ARGUMENTS = ("--cluster", "16xA100-80GB", "--seq", "128", "--global-batch", "64")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def result(files: Path) -> Result:
    options = ("--strategy", "fsdp,hsdp", "--micro-batch", "2", "--checkpointing", "none,full")
    outputs = (f"--{name}={files / name}" for name in ("html", "trace"))
    found = run(
        f"{__name__}:small",
        *ARGUMENTS,
        *options,
        "--tokens=1T",
        "--price=2",
        "--explain",
        "--checkpoint",
        *outputs,
    )
    assert found.code == 0, found.errors
    return found


def test_the_tables_fit_on_100_columns(result: Result) -> None:
    assert max(map(len, result.output.splitlines())) <= 100


def test_the_best_is_explained_priced_and_called(result: Result) -> None:
    assert re.search(
        r"^Best: \w+ over [\dx ]+, micro-batches 2 x 2, checkpointing", result.output, re.MULTILINE
    )
    assert re.search(r"tokens/s per GPU, .* MFU [\d.]+%, HFU [\d.]+%", result.output)
    assert re.search(r"GPU-hours \([\d.,]+ days\), [\d,]+ at 2 each", result.output)
    assert "- Bound by " in result.output
    assert "checkpointing full: " in result.output
    assert "sw.fully_shard(" in result.output
    assert re.search(r"^ +16,384 ", result.output, re.MULTILINE)  # the last point of the curve
    assert "The gather of a block" in result.output
    assert re.search(r"^A checkpoint: [\d.]+ MB in 2 files", result.output, re.MULTILINE)
    assert re.search(r"^ *save +[\d.]+ .B +[\d.]+ .B", result.output, re.MULTILINE)


def test_the_page_and_the_trace_are_written(result: Result, files: Path) -> None:
    assert result.output.count(": written") == 2
    assert (files / "html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert '"traceEvents"' in (files / "trace").read_text("utf-8")


@pytest.mark.usefixtures("result")
@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is on the PATH")
def test_the_page_draws_on_a_laptop_and_a_phone(files: Path, tmp_path: Path) -> None:
    (files / "page.html").write_bytes((files / "html").read_bytes())
    with open_browser(tmp_path / "profile") as page:
        for width in (1280, 390):
            page.show(files / "page.html", width=width)
            assert page.get("document.documentElement.scrollWidth") == width
            for canvas in (
                "#timeline-canvas",
                "#memory-canvas",
                "#charts figure:nth-child(2) canvas",
            ):
                assert page.num_colors(canvas) > 3
        page.click("#candidates-table th:nth-child(12) button")
        first = "document.querySelector('#candidates-table tbody tr').dataset.name"
        assert "checkpointing none" in page.get(first)  # with the most memory
        page.type("#candidate-filter", "hsdp")
        assert re.fullmatch(r"\d+ of \d+ configurations", page.text("#candidate-count"))
        page.get("document.querySelector('#charts canvas').scrollIntoView()")
        x, y = page.middle("#charts canvas")
        page.mouse("mouseMoved", x, y)
        assert re.search(r"fsdp over .*tokens/s|frontier", page.text("#tooltip"))
        assert page.problems == []


def test_other_candidates_are_compared_by_their_step_time(result: Result) -> None:
    assert re.search(
        r"^- checkpointing full: 1\.\d+ times the step time, ", result.output, re.MULTILINE
    )
    assert "% slower" not in result.output


def test_a_function_in_a_file_or_module_of_this_directory_builds_the_model(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    (elsewhere / "here.py").write_text(
        "from beside import SHAPE\n"
        "from shardwise.forecast.models.transformer import build\n\n"
        "def model():\n"
        "    built = build(SHAPE).bfloat16()\n"
        "    built.embedding.requires_grad_(False)\n"
        "    return built\n"
    )
    (elsewhere / "beside.py").write_text(
        "from shardwise.forecast.models.transformer import Shape\n\n"
        "SHAPE = Shape(arch='gpt', layers=2, hidden=64, heads=2, vocab=512)\n"
    )
    options = "--cluster=1xRTX4090", "--seq=1", "--global-batch=1", "--no-scaling"
    for name in ("here:model", "here.py:model", f"{elsewhere}/here.py:model"):
        found = run(name, *options)
        assert found.code == 0, found.errors
        [title, *_] = found.output.split("\n\n")
        assert " ".join(title.split()) == (
            f"{name} on 1 x RTX-4090: 0.1642 million parameters, 0.1314 million of them trained; "
            "1 GPU of one node; 1 sequence of 1 token per step; adamw; compute in bfloat16; "
            "best tokens/s of 3 configurations; 1 GB is 10^9 bytes"
        )
        assert 'master_dtype="keep"' in found.output
    assert "here.py has no function 'no'" in run("here.py:no", *options).errors
    assert "there.py: no such file" in run("there.py:model", *options).errors
    (elsewhere / "wrong.py").write_text("def model():\n    return 1\n")
    assert (
        "expected the function to return a torch.nn.Module, got int"
        in run("wrong.py:model", *options).errors
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama-3-8b"], "did you mean 'llama-3-8b'"),
        (["gpt2", "--cluster", "64xH10"], "did you mean 'H100'"),
        (["gpt2", "--cluster", "many"], "expected COUNTxNAME"),
        (["gpt2", *ARGUMENTS[:2], "--global-batch", "60"], "use 48 or 64"),
        (["gpt2", *ARGUMENTS, "--micro-batch", "3"], "micro_batch=3: expected a divisor of the 4"),
        (["gpt2", *ARGUMENTS, "--tensor", "x"], "--tensor x: expected an integer of 1 or more"),
        (["gpt2", *ARGUMENTS, "--strategy", "fspd"], "did you mean 'fsdp'"),
        (["gpt2", *ARGUMENTS, "--checkpointing", "ful"], "did you mean 'full'"),
        (["gpt2", *ARGUMENTS, "--objective", "speed"], "expected one of tokens/s, memory, cost"),
        (["gpt2", *ARGUMENTS, "--tokens", "1Q"], "--tokens 1Q: expected a number such as 300B"),
        (["gpt2", *ARGUMENTS, "--html", "no/such/page.html"], "no/such is not a directory"),
        (["gpt2", *ARGUMENTS, "--seq", "0"], "sequence=0: expected an integer of 1 or more"),
        (["json:dumps"], "'json:dumps': the function failed: TypeError: dumps() missing 1 req"),
        (
            ["gpt2", "--optimizer", "torch.optim:AdamX"],
            "has no function 'AdamX'; did you mean 'Ada",
        ),
        (
            ["gpt2", *ARGUMENTS, "--chunks", "2"],
            "chunks=2: expected pipeline to be 2 or more, got 1",
        ),
        (["gpt2", *ARGUMENTS, "--expert", "2"], "expert=2: model 'gpt2' has no experts"),
        (["gpt2", "--qlora", "--float8", "rowwise"], "products with 4-bit weights are in torch.bf"),
        (["gpt2", "--lora", "alpha=nan"], "alpha=nan: expected a number"),
        (["gpt2", "--lora", "r=16,r=8"], "--lora r=16,r=8: r is given twice"),
        (["gpt2", "--lora", ""], "--lora : expected one or more of r="),
        (["gpt2", "--lora", "no.json"], "--lora no.json: No such file or directory; expected opt"),
        (["gpt2", "--strategy", ""], "--strategy '': expected one or more names"),
        (["gpt2", "--price", "2"], "--price 2: expected a number, with --tokens N"),
        (["gpt2", "--price", "inf", "--tokens=1T"], "--price inf: expected a number"),
        (["gpt2", "--storage", "2"], "--storage 2: expected --checkpoint"),
        (
            ["mixtral-8x7b", "--checkpoint", "--expert", "2"],
            "--expert 2: checkpoints can be planned",
        ),
        (["gpt2", "--checkpoint", "--storage", "0"], "--storage 0: expected a number above 0"),
        (["gpt2", "--checkpoint", "--storage", "inf"], "--storage inf: expected a number above 0"),
        ([str(Path(__file__).parent)], "config.json: No such file or directory; expected a direc"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(arguments: list[str], message: str) -> None:
    found = run(*arguments)
    assert found.code == 2
    assert message in found.errors
    assert found.errors.count("\n") == 1


def test_what_does_not_fit_says_by_how_much() -> None:
    found = run(
        f"{__name__}:huge", "--cluster", "8xH100", "--global-batch", "8", "--no-offload",
        "--strategy", "fsdp", "--checkpointing", "full",
    )  # fmt: skip
    assert found.code == 2
    expected = (
        r"huge does not fit: .* needs [\d.]+ TB more than a GPU's [\d.]+ GB, at \w+.*: "
        r"\w+ [\d.]+ .B, .*; use .* or --offload"
    )
    assert re.search(expected, found.errors)
    assert " on the host" not in found.errors


def test_what_does_not_fit_has_figures_with_offload(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    found = run(
        f"{__name__}:huge", "--cluster", "8xH100", "--global-batch", "8", "--strategy", "fsdp",
        f"--html={page}",
    )  # fmt: skip
    assert found.code == 2
    smallest = "fsdp over 8, micro-batches 1 x 1, checkpointing full, parameters and activations on"
    assert f"Smallest, but too large: {smallest}" in " ".join(found.output.split())
    assert re.search(r"tokens/s per GPU, .* MFU [\d.]+%, HFU [\d.]+%", found.output)
    text = " ".join(found.output.split())
    assert re.search(r"[\d.]+ .B of host memory per GPU, [\d.]+ .B per node", text)
    assert "sw.CPUOffloadPolicy()" in found.output
    assert smallest in found.errors
    assert "huge does not fit: the smallest of" in page.read_text("utf-8")


def test_an_alternative_that_does_not_fit_is_tried_with_offload() -> None:
    found = run(
        "llama-3-8b", "--cluster", "8xA100-40GB", "--seq", "4096", "--global-batch", "32",
        "--strategy", "fsdp", "--micro-batch", "2", "--checkpointing", "none,full", "--no-scaling",
    )  # fmt: skip
    assert found.code == 0
    output = " ".join(found.output.split())
    full = "checkpointing full, micro-batch 2: fits only with optimizer on the host"
    none = "checkpointing none, micro-batch 2: does not fit even with offload"
    for line in (full, none):
        assert f"{line}; without offload it needs " in output


def test_progress_is_said_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 1.0, 2.5, 2.5, 3.0, 5.0, 5.0])
    progress = Progress(lambda: next(now))
    for number in range(4):
        progress(f"part {number}")
    assert capsys.readouterr().err == "part 1 ...\npart 3 ...\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        "--qlora --cluster 1xRTX4090 --seq 1024 --global-batch 16",
        "--lora r=16 --cluster 8xH100 --global-batch 64",
        "--cluster 64xH100 --seq 8192 --global-batch 512",
    ],
)
def test_llama_3_8b_is_planned_and_explained_in_seconds(options: str) -> None:
    began = time.process_time()
    found = run("llama-3-8b", *options.split())
    assert found.code == 0
    assert time.process_time() - began < 80, "it takes less than 20 on a quiet machine"
    assert "\nBest: " in found.output
    assert re.search(r"- Bound by [^:]+: \d+%\s+of\s+a\s+step", found.output)
    assert len(re.findall(r"^- .* times the step time", found.output, re.MULTILINE)) > 1


@pytest.mark.thorough
def test_70_billion_parameters_on_1024_gpus_take_little_time_and_memory(tmp_path: Path) -> None:
    """CPU time with a page is measured, because elapsed time depends on the load."""
    command = [sys.executable, "-m", "shardwise", "plan", "llama-3-70b", "--cluster", "1024xH100"]
    options = ["--seq", "8192", "--global-batch", "2048", "--html", str(tmp_path / "page.html")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 120, "it takes less than 30 on a quiet machine"
    assert usage.ru_maxrss < 2_000_000  # kB
