"""What `verify` found: data to read, a table to show, an error to raise.

One more leaf of the tree in `shardwise.errors`::

    ShardwiseError
    └── VerificationError(AssertionError)   a strategy gives other numbers than one process
"""

from dataclasses import dataclass

from rich.table import Table

from shardwise.errors import ShardwiseError

__all__ = ["Comparison", "Verification", "VerificationError", "Worst"]


class VerificationError(ShardwiseError, AssertionError):
    """A strategy gives other numbers than one process; names what differs, and by how much."""


@dataclass(frozen=True, slots=True)
class Worst:
    """Where one kind of number was farthest from the reference."""

    error: float = 0.0  # relative; inf where a value is missing or is not a number
    name: str = ""  # of the parameter; "" for the loss, and where nothing differs at all
    step: int = 0  # from 0
    note: str = ""  # what was expected and got, where no number can say it


@dataclass(frozen=True, slots=True)
class Comparison:
    """One strategy against one process."""

    strategy: str
    num_ranks: int
    num_steps: int  # that were compared: none after the first that differs
    tolerance: float
    loss: Worst
    gradient: Worst
    parameter: Worst  # after the optimizer's step

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> tuple[str, ...]:
        """What is off by more than the tolerance, in words."""
        found = {
            "loss": self.loss,
            f"gradient of {self.gradient.name}": self.gradient,
            f"{self.parameter.name} after the optimizer's step": self.parameter,
        }
        return tuple(
            f"{what} in step {worst.step} {worst.note or f'is off by {worst.error:.1e}'}"
            for what, worst in found.items()
            if worst.error > self.tolerance
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found; the same on every rank."""

    comparisons: tuple[Comparison, ...]  # in the order of the strategies

    @property
    def ok(self) -> bool:
        """Whether every strategy gives the numbers of one process."""
        return all(comparison.ok for comparison in self.comparisons)

    def table(self) -> Table:
        """The relative errors, for a rich console."""
        first = self.comparisons[0]
        table = Table(
            "strategy",
            "loss",
            "gradient, at worst",
            "parameter, at worst",
            "verdict",
            title=f"{_count(first.num_ranks, 'rank')} against one process, relative errors",
        )
        for one in self.comparisons:
            cells = (_cell(worst) for worst in (one.loss, one.gradient, one.parameter))
            table.add_row(one.strategy, *cells, "equal" if one.ok else "DIFFERS")
        return table

    def raise_for_difference(self) -> None:
        """Raise if a strategy differs.

        Raises:
            VerificationError: a line for each strategy that differs.
        """
        lines = [
            f"{one.strategy} on {_count(one.num_ranks, 'rank')} differs from one process: "
            f"{'; '.join(one.differences)} (tolerance {one.tolerance:.1e})"
            for one in self.comparisons
            if not one.ok
        ]
        if lines:
            raise VerificationError("\n".join(lines))


def _cell(worst: Worst) -> str:
    return f"{worst.error:.1e}\n{worst.name}" if worst.name else f"{worst.error:.1e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
