"""Usage and configuration errors: one line on stderr and exit code 2, before any rank starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli import main

from .commands import environment, fail, run

COMMAND_LINES = {
    "nope.toml": "nope.toml: no such file",
    "{tiny} --frobnicate": "No such option: --frobnicate",
    "{tiny} --nproc two": "Invalid value for '--nproc'",
    "{tiny} --nproc 0": "--nproc 0: expected 1 or more ranks",
    "{tiny} --nproc -2": "--nproc -2: expected 1 or more ranks",
    "{tiny} --replicas 0": "Invalid value for '--replicas'",
    "{tiny} --nproc 3": "train.global_batch=8 is not divisible by 3 ranks; "
    "set train.global_batch to 6 or 9",
    "{tiny} --set train.micro_batch=3": "set train.global_batch to 6 or 12, "
    "or train.micro_batch to 2",
    "{tiny} --set train.stpes=3": "unknown key 'train.stpes'; did you mean 'train.steps'?",
    "{tiny} --set train.steps": "expected section.key=value",
    "{tiny} --set train.steps=few": "train.steps: expected a valid integer, got 'few'",
    "{tiny} --set train.steps=0": "train.steps: expected a number greater than or equal to 1",
    "{tiny} --set shard.nproc=0": "shard.nproc: expected a number greater than or equal to 1",
    "{tiny} --set model.lora_rank=8": "lora_rank=8: expected the model of model.path to adapt",
    "{tiny} --memory nan": "--memory 'nan': expected bytes, such as '24 GB'",
    "{tiny} --set shard.units=Blok": "units='Blok': expected a module class of the model or "
    "its name, a set of them, 'auto', a size in parameters, or a policy; did you mean 'Block'?",
    "{tiny} --set shard.units=0": "units=0",
    "{tiny} --set shard.strategy=zero9": "strategy='zero9': expected one of",
    "{tiny} --set shard.replicas=2": "shard.replicas=2: strategy 'fsdp' has no replicas",
    "{tiny} --set shard.strategy=hsdp --set shard.replicas=4": "does not divide the 2 ranks",
    "{tiny} --set data.path=/no/such/text": "data.path='/no/such/text': no such file",
    "{tiny} --set data.validation=/no/such/text": "data.validation='/no/such/text': no such file",
    "{tiny} --set model.path=/no/such": "model.path='/no/such': expected a directory with",
    "{tiny} --set data.glob=*.rs": "no file matches data.glob='*.rs'",
    "{tiny} --set model.context=1000000": "use more text",
    "{tiny} --set run.directory={tiny}/run": "cannot be written: Not a directory",
    "{tiny} --set run.directory={tiny.parent}": "already has files",
}


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(("command_line", "message"), COMMAND_LINES.items())
def test_an_error_is_one_line(
    command_line: str, message: str, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capfd, ["train", *command_line.format(tiny=tiny).split()])


def test_no_files_are_written(
    tiny: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(capfd, ["train", str(tiny), "--set", "data.path=/no/such/text"])
    assert list(elsewhere.iterdir()) == []


def test_a_broken_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\nsteps = 3", encoding="utf-8")
    assert "is not valid TOML" in fail(capfd, ["train", str(broken)])


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert "No such command 'trian'" in fail(capfd, ["trian"])


def test_a_rank_without_the_address_of_the_others(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "set MASTER_ADDR and MASTER_PORT" in fail(capfd, ["train", str(tiny)])


def test_the_exit_code_of_the_process(tiny: Path, tmp_path: Path) -> None:
    finished = run(["train", tiny, "--nproc", "0"], tmp_path)
    assert finished.code == 2
    assert finished.stderr == "shardwise: --nproc 0: expected 1 or more ranks\n"


@pytest.mark.parametrize("program", [["shardwise"], ["python", "-m", "shardwise"]])
def test_the_version_needs_no_torch(program: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(program[0]), *program[1:], "--version"],
        cwd=tmp_path,
        env=environment(PYTHONPROFILEIMPORTTIME="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"shardwise {sw.__version__}\n"
    assert "shardwise.cli" in done.stderr
    assert not re.search(r"\btorch$", done.stderr, re.MULTILINE), "it takes seconds"


@pytest.mark.parametrize("command", ["", "train", "bench", "verify", "report", "export"])
def test_no_text_of_the_help_is_cut(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    shown = capfd.readouterr().out.replace("[ARGS]...", "")
    assert "…" not in shown
    assert "..." not in shown
    assert ("[model]" in shown) == (command == "bench"), "brackets are not markup"


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        assert "train" in capfd.readouterr().out
    assert main(["train", "--help"]) == 0
    shown = capfd.readouterr().out
    assert "CONFIG.toml" in shown
    assert "--set" in shown
    assert "--nproc" in shown


@pytest.mark.parametrize(
    "command", [["doctor", "gone"], ["export", "gone", "out"], ["report", "."]]
)
def test_what_is_not_there_is_a_usage_error(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    fail(capfd, command)


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        (["--version"], "stdout", 141),
        (["plan", "--help"], "stdout", 1),  # of rich, which prints the help
        (["plan"], "stderr", 141),
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str], closed: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardwise", *arguments]
    stdout, stderr = (writer if one == closed else subprocess.PIPE for one in ("stdout", "stderr"))
    with subprocess.Popen(command, text=True, stdout=stdout, stderr=stderr) as process:
        printed = process.communicate()
    os.close(writer)
    assert process.returncode == code
    assert [text for text in printed if text] == []
