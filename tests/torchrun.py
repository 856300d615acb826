"""Programs of the tests and the examples, run under ``torchrun``."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import environment
from tests.runtime.one_process import rank, world_size

__all__ = ["torchrun", "torchrun_environment"]

_ROOT = Path(__file__).parents[1]


def torchrun(num_ranks: int, *program: str, **variables: str) -> None:
    """Run ``program``, a script or ``-m`` a module with its arguments, on local ranks.

    Args:
        num_ranks: how many.
        program: the arguments of ``torchrun`` after its own options.
        variables: of the environment, besides those of every command.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    finished = subprocess.run(
        [sys.executable, *launch, *program],
        cwd=_ROOT,
        env={**environment(), "PYTHONPATH": f"{_ROOT}/src:{_ROOT}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]


@contextlib.contextmanager
def torchrun_environment() -> Iterator[None]:
    """Set the variables by which accelerate recognizes a distributed run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, str(rank()))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, str(world_size()))
        yield
