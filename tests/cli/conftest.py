"""The configuration of a run that takes seconds."""

import json
import os
import sysconfig
from pathlib import Path

import pytest

from .commands import LAUNCHERS

TINY = """
[run]
name = "tiny"
log_every = 5

[model]
layers = 2
heads = 2
width = 32
context = 32

[data]
path = {text}

[train]
steps = 20
global_batch = 8
warmup_share = 0.1
validation_batches = 2

[sample]
bytes = 20
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove a launcher's variables, and run in an empty directory, so that new files are seen."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of 20 small steps on one package of the standard library."""
    source = Path(sysconfig.get_path("stdlib")) / "email"
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY.format(text=json.dumps(str(source))), encoding="utf-8")
    return path
