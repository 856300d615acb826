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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_the_package_alone_and_the_sdist_builds_the_same(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, sdist = built
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


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, built: tuple[Path, Path]) -> Environment:
    """An environment with the wheel, and what it depends on."""
    environment = Environment.create(tmp_path_factory.mktemp("bare"))
    environment.install("--no-deps", "--no-index", str(built[0]))
    environment.borrow_packages()
    return environment


def test_the_wheel_is_installed_with_what_it_needs(bare: Environment, tmp_path: Path) -> None:
    where = bare.run(tmp_path, "python", "-c", "import shardwise; print(shardwise.__file__)")
    assert where.startswith(str(bare.directory))
    checked = bare.run(tmp_path, "python", "-m", "pip", "check")
    assert "No broken requirements" in checked
    assert bare.run(tmp_path, "shardwise", "--version").startswith("shardwise 0.")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_wheel_runs_from_an_empty_directory(bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    train = ["tiny.toml", "--nproc", "1", "--set", "run.directory=run"]
    trained = bare.run(tmp_path, "shardwise", "train", *train)
    assert "validation loss" in trained
    assert "report.html" in bare.run(tmp_path, "shardwise", "report", "run")
    verify = ["verify", "gpt", "--nproc", "1", "--strategies", "fsdp"]
    assert "equal" in bare.run(tmp_path, "shardwise", *verify)
    bench = ["--size", "tiny.toml", "--rounds", "2", "--sequence", "8"]
    measured = bare.run(tmp_path, "shardwise", "bench", *bench, "--vs", "ddp", "--ours", "fsdp")
    assert "results.json" in measured
