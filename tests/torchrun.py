"""Programs of the tests and the examples, run under ``torchrun``."""

import subprocess
import sys
from pathlib import Path

from tests.cli.commands import environment

__all__ = ["torchrun"]

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
