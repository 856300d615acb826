"""The documentation site: ``python -m docs.build.site``, or ``make docs``.

It is written to build/site, needs no network, and can be read from its files. A link, an anchor or
a page that is missing is an error.
"""

import subprocess
import sys
from pathlib import Path

from docs.build.assemble import assemble
from docs.build.check import problems_of
from docs.build.reference import GENERATED

__all__ = ["build"]

ROOT = Path(__file__).parents[2]
SOURCES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"


def build() -> list[str]:
    """Build the site; returns what is wrong with it."""
    assemble(ROOT, SOURCES, GENERATED)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        return [(done.stdout + done.stderr).partition("Traceback")[0]]
    return problems_of(SITE)


if __name__ == "__main__":
    problems = build()
    print(*problems or [f"{SITE}/index.html"], sep="\n")  # noqa: T201
    sys.exit(bool(problems))
