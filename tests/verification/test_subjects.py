"""Models are found by name or by the user's own function."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.run_verify import BUILT_IN
from shardwise.errors import ConfigError
from shardwise.verification.families import FAMILIES
from shardwise.verification.subjects import find_subjects

OWN = """
from torch import nn, ones
from neighbour import WIDTH

def two():
    return lambda: nn.Linear(WIDTH, 1), lambda step: ones(4, WIDTH)

def four():
    return [*two(), lambda model, batch: model(batch).mean(), nn.Linear]

def one():
    return (two,)

def wrong():
    return 1, 2

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a user's module, and a module that it imports, into the current directory."""
    (tmp_path / "own_model.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("WIDTH = 5", encoding="utf-8")
    (tmp_path / "broken_model.py").write_text("import not_there", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = set(sys.modules)
    yield tmp_path
    for name in ("own_model", "verified_own_model", "neighbour", "broken_model"):
        if name not in known:
            sys.modules.pop(name, None)


def test_built_in_names() -> None:
    assert find_subjects(None, BUILT_IN) == list(BUILT_IN.values())
    assert find_subjects("conv", BUILT_IN) == [BUILT_IN["conv"]]
    assert find_subjects("t5", BUILT_IN) == [FAMILIES["t5"]]
    assert len(find_subjects("hf", BUILT_IN)) == 7


@pytest.mark.parametrize("source", ["own_model", "own_model.py", "{own}/own_model.py"])
def test_the_users_own(source: str, own: Path) -> None:
    source = source.format(own=own)
    [subject] = find_subjects(f"{source}:two", BUILT_IN)
    assert subject.batch_fn(0).shape == (4, 5)
    assert subject.loss_fn is None
    assert subject.units == "auto"
    [subject] = find_subjects(f"{source}:four", BUILT_IN)
    assert subject.loss_fn is not None
    assert isinstance(subject.units, type)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gtp", "gtp: expected one of gpt, moe, .*; did you mean 'gpt"),
        ("xyz", ", module:function or file.py:function"),
        ("nope.py:two", "nope.py: no such file"),
        ("nope:two", "nope: no such module"),
        ("own_model.nope:two", "own_model.nope: no such module"),
        ("own_model:three", "own_model has no function 'three'"),
        ("own_model:number", "own_model has no function 'number'"),
        ("own_model:one", r"own_model:one returned tuple of 1: expected \(model_fn, batch_fn\)"),
        ("own_model:wrong", "returned tuple of 2: expected"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_mistake_is_reported(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_subjects(model, BUILT_IN)


@pytest.mark.usefixtures("own")
def test_an_error_in_the_users_module_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        find_subjects("broken_model:two", BUILT_IN)
