"""The checks: each has a name, what it needs, and a body that runs on every rank."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

__all__ = ["CHECKS", "SECTIONS", "Check", "Context", "check"]

# Seconds that the checks of a section may take together, and how many run at the same time.
SECTIONS = {
    "one rank": (110, 4),
    "ranks": (75, 3),
    "fuzz": (60, 2),
    "no waits": (45, 4),
    "forecast": (75, 1),
    "fake group": (150, 1),
    "cards": (180, 1),
}
EVERYWHERE = ("cuda", "cpu", "simulated")
CHECKPOINTS = ("pydantic", "zlib_ng", "psutil")
_LABELS = {"cuda": "a GPU", "cpu": "the CPU", "simulated": "the simulated device"}


@dataclass
class Context:
    """What the body of a check knows of its rank.

    ``report(name, value)`` adds a figure to the results at once, so a crash does not lose it.
    """

    kind: str  # of the device: "cuda", "cpu" or "simulated"
    device: torch.device
    rank: int
    num_ranks: int
    report: Callable[[str, Any], None]
    simulation: Any = None
    seconds: float = 60.0
    earlier_runs: int = 0  # of the body, in this process

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Within this, the host must not wait for the device."""
        if self.kind == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        if self.simulation is not None:
            self.simulation.is_steady = True
        try:
            yield
        finally:
            if self.kind == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            if self.simulation is not None:
                self.simulation.is_steady = False


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        section: in `SECTIONS`.
        name: of the check.
        body: raises an error if something is wrong.
        ranks: processes.
        group: "nccl", "fake" (one of eight), "none", or for several ranks on one card "staged", or
            "monitored", if an error of one rank must reach the others on a CPU as well.
        seconds: deadline of the body.
        modules: packages that it needs besides torch and numpy.
        kinds: devices on which it makes sense.
        cards: how many it needs.
    """

    section: str
    name: str
    body: Callable[[Context], object]
    ranks: int = 1
    group: str = "nccl"
    seconds: float = 60.0
    modules: tuple[str, ...] = ()
    kinds: tuple[str, ...] = EVERYWHERE
    cards: int = 1

    def why_not(self, kind: str, num_cards: int) -> str:
        """Return why it cannot run here, or "" if it can."""
        if kind not in self.kinds:
            return f"needs {' or '.join(_LABELS[kind] for kind in self.kinds)}"
        cards = max(self.cards, self.ranks if self.section == "cards" else 1)
        if kind == "cuda" and num_cards < cards:
            return f"needs {cards} cards, and there are {num_cards}"
        missing = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return f"needs {', '.join(missing)}" if missing else ""


CHECKS: list[Check] = []


@dataclass(frozen=True)
class check:  # noqa: N801 - a decorator
    """Register the decorated function; keyword arguments of ``values`` are passed to it."""

    section: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __call__(self, body: Callable[..., object]) -> Callable[..., object]:
        CHECKS.append(Check(self.section, self.name, partial(body, **self.values), **self.options))
        return body
