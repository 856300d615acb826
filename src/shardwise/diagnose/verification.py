"""What `verify` found: data to read, a table to show, an error to raise.

One more leaf of the tree in `shardwise.errors`::

    ShardwiseError
    └── VerificationError(AssertionError)   a strategy gives other numbers than one process
"""

from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError

__all__ = ["Comparison", "Verification", "VerificationError", "Worst"]

HEAD = f"{'strategy':<12}{'loss':>9}{'gradient':>10}{'update':>10}  {'verdict':<9}worst parameter"


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
            "the loss": self.loss,
            f"the gradient of {self.gradient.name}": self.gradient,
            f"{self.parameter.name} after the optimizer's step": self.parameter,
        }
        return tuple(
            f"{what} in step {worst.step} {worst.note or f'is off by {worst.error:.1e}'}"
            for what, worst in found.items()
            if worst.error > self.tolerance
        )

    @property
    def worst(self) -> Worst:
        """The gradient's if that differs, for all else follows from it; otherwise the larger."""
        if self.gradient.error > self.tolerance:
            return self.gradient
        return max(self.gradient, self.parameter, key=lambda worst: worst.error)

    @property
    def row(self) -> str:
        """Its line in the table, under ``HEAD``."""
        loss, gradient, update = (
            f"{worst.error:.1e}" if worst.error else "0"
            for worst in (self.loss, self.gradient, self.parameter)
        )
        verdict = "equal" if self.ok else "DIFFERS"
        line = f"{self.strategy:<12}{loss:>9}{gradient:>10}{update:>10}  {verdict:<9}"
        return (line + self.worst.name).rstrip()


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found; the same on every rank."""

    model: str  # the class of its root
    num_ranks: int
    comparisons: tuple[Comparison, ...]  # in the order of the strategies

    @property
    def ok(self) -> bool:
        """Whether every strategy gives the numbers of one process."""
        return all(comparison.ok for comparison in self.comparisons)

    def plus(self, comparison: Comparison) -> "Verification":
        return replace(self, comparisons=(*self.comparisons, comparison))

    @property
    def title(self) -> str:
        return f"{self.model}, {self._ranks} against one process: relative errors"

    @property
    def table(self) -> str:
        """The relative errors, a line for each strategy."""
        rows = (comparison.row for comparison in self.comparisons)
        return "\n".join([self.title, HEAD, *rows])

    @property
    def explanation(self) -> str:
        """A line for each strategy that differs."""
        return "\n".join(
            f"{self.model} with {one.strategy} on {self._ranks} differs from one process: "
            f"{'; '.join(one.differences)} (tolerance {one.tolerance:.0e})"
            for one in self.comparisons
            if not one.ok
        )

    def raise_for_difference(self) -> None:
        """Raise if a strategy differs.

        Raises:
            VerificationError: says which, in what and by how much.
        """
        if not self.ok:
            raise VerificationError(self.explanation)

    @property
    def _ranks(self) -> str:
        return f"{self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"
