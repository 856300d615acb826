"""The wheel and the sdist: what they contain, and that the wheel runs with nothing else of ours."""

import json
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import ROOT, Environment, build

NOT_CODE = {"css", "html", "js", "json", "typed"}
SDIST = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src"}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_alone_and_the_sdist_builds_the_same(tmp_path: Path) -> None:
    wheel, sdist = build(ROOT, tmp_path / "dist")
    source = ROOT / "src"
    files = (path for path in source.rglob("*.*") if "__pycache__" not in path.parts)
    package = {path.relative_to(source).as_posix() for path in files if path.is_file()}
    assert {name.rpartition(".")[2] for name in package} == NOT_CODE | {"py"}
    assert "shardwise/py.typed" in package
    found = contents(wheel)
    info = {name for name in found if ".dist-info/" in name}
    assert set(found) - info == package
    assert {name.partition("/")[2] for name in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    with tarfile.open(sdist) as archive:
        assert {name.split("/")[1] for name in archive.getnames()} == SDIST
        archive.extractall(tmp_path, filter="data")
    again, _ = build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "again")
    assert contents(again) == found


TINY = f"""
[model]
layers = 2
heads = 1
width = 16
context = 16
[data]
path = {json.dumps(sysconfig.get_path("stdlib") + "/json")}
[train]
steps = 6
global_batch = 4
validation_batches = 1
[record]
steps = [2, 3, 4]
[sample]
bytes = 4
"""


@pytest.mark.timeout(900)
def test_the_wheel_runs_from_an_empty_directory(tmp_path: Path) -> None:
    wheel, _ = build(ROOT, tmp_path / "dist")
    bare = Environment.create(tmp_path / "bare")
    bare.install("--no-deps", "--no-index", str(wheel))
    bare.borrow_packages()
    empty = tmp_path / "empty"
    empty.mkdir()
    where = bare.run(empty, "python", "-c", "import shardwise; print(shardwise.__file__)")
    assert where.startswith(str(bare.directory))
    checked = bare.run(empty, "python", "-m", "pip", "check")
    assert "No broken requirements" in checked
    assert bare.run(empty, "shardwise", "--version").startswith("shardwise 0.")
    (empty / "tiny.toml").write_text(TINY, encoding="utf-8")
    train = ["tiny.toml", "--nproc", "1", "--set", "run.directory=run"]
    trained = bare.run(empty, "shardwise", "train", *train)
    assert "validation loss" in trained
    assert "report.html" in bare.run(empty, "shardwise", "report", "run")
    verify = ["verify", "gpt", "--nproc", "1", "--strategies", "fsdp"]
    assert "equal" in bare.run(empty, "shardwise", *verify)
    bench = ["--size", "tiny.toml", "--rounds", "2", "--sequence", "8"]
    measured = bare.run(empty, "shardwise", "bench", *bench, "--vs", "ddp", "--ours", "fsdp")
    assert "results.json" in measured
