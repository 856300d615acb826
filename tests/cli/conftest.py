"""A configuration of a run that takes seconds."""

import json
import sysconfig
from pathlib import Path

import pytest

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
warmup_steps = 2
validation_batches = 2

[sample]
bytes = 20
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of 20 small steps on one package of the standard library."""
    source = Path(sysconfig.get_path("stdlib")) / "email"
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY.format(text=json.dumps(str(source))), encoding="utf-8")
    return path
