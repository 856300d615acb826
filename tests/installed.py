"""The built package in an environment of its own, where nothing else of the repository is."""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import LAUNCHERS

__all__ = ["ROOT", "Environment", "build"]

ROOT = Path(__file__).parents[1]
_OURS = (*LAUNCHERS, "PYTHON", "PYTEST", "VIRTUAL_ENV")


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of the project at ``source``, written to ``out``."""
    _run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], source)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@dataclass(frozen=True)
class Environment:
    """A virtual environment, at first empty."""

    directory: Path

    @classmethod
    def create(cls, directory: Path) -> "Environment":
        venv.create(directory, symlinks=True)
        return cls(directory)

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def install(self, *words: str) -> None:
        """``pip install`` with these arguments, by the pip of this process's environment."""
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        _run([*pip, "install", "-q", "--no-compile", *words], self.directory)

    def borrow_packages(self) -> None:
        """Show the packages of this process's environment, except those in development mode."""
        [site] = self.directory.glob("lib/python*/site-packages")
        shared = [path for path in sys.path if Path(path).name == "site-packages"]
        (site / "borrowed.pth").write_text("\n".join(shared), encoding="utf-8")

    def popen(self, cwd: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a command that this environment has; its output is that of both streams."""
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=self._variables() | variables,
            executable=self.directory / "bin" / words[0],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, cwd: Path, *words: str, code: int = 0) -> str:
        """Run a command that must exit with ``code``; its output."""
        process = self.popen(cwd, *words)
        output, _ = process.communicate()
        assert process.returncode == code, f"{' '.join(words)}: {process.returncode}\n{output}"
        return output

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


def _run(words: list[str], cwd: Path) -> None:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
