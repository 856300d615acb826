"""The result of `verify`: a table to print and an error to raise."""

from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError
from shardwise.plan.spelling import counted

__all__ = ["Comparison", "Verification", "VerificationError", "Worst"]

HEAD = f"{'strategy':<12}{'loss':>9}{'gradient':>10}{'update':>10}  {'verdict':<9}worst parameter"


class VerificationError(ShardwiseError, AssertionError):
    """A strategy differs from one process. The message says what differs, and by how much."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of one kind (loss, gradients or updates)."""

    error: float = 0.0  # relative; inf where a value is missing or NaN
    name: str = ""  # the parameter; "" for the loss, or if nothing differs
    step: int = 0  # counted from 0
    note: str = ""  # expected and actual value if one is missing, or the possible causes


@dataclass(frozen=True, slots=True)
class Comparison:
    strategy: str
    num_steps: int  # steps compared, up to the first that differs
    tolerance: float
    loss: Worst
    gradient: Worst
    parameter: Worst  # after the optimizer step

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> tuple[str, ...]:
        """One phrase for each error above the tolerance."""
        found = {
            "the loss": self.loss,
            f"the gradient of {self.gradient.name}": self.gradient,
            f"{self.parameter.name} after the optimizer's step": self.parameter,
        }
        return tuple(
            f"{subject} in step {worst.step} {worst.note or f'is off by {worst.error:.1e}'}"
            for subject, worst in found.items()
            if worst.error > self.tolerance
        )

    @property
    def worst(self) -> Worst:
        """The gradient's error if it is above the tolerance, otherwise the larger error."""
        if self.gradient.error > self.tolerance:
            return self.gradient
        return max(self.gradient, self.parameter, key=lambda worst: worst.error)

    @property
    def row(self) -> str:
        loss, gradient, update = (
            f"{worst.error:.1e}" if worst.error else "0"
            for worst in (self.loss, self.gradient, self.parameter)
        )
        verdict = "equal" if self.ok else "DIFFERS"
        line = f"{self.strategy:<12}{loss:>9}{gradient:>10}{update:>10}  {verdict:<9}"
        return (line + self.worst.name).rstrip()


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`, the same on every rank."""

    model: str  # class of the root module
    num_ranks: int
    comparisons: tuple[Comparison, ...]  # in the order of the strategies

    @property
    def ok(self) -> bool:
        """Whether the results of every strategy equal those of one process."""
        return all(comparison.ok for comparison in self.comparisons)

    def plus(self, comparison: Comparison) -> "Verification":
        return replace(self, comparisons=(*self.comparisons, comparison))

    @property
    def title(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        return f"{self.model}, {ranks} against one process: relative errors"

    @property
    def table(self) -> str:
        """The relative errors, one line per strategy."""
        rows = (comparison.row for comparison in self.comparisons)
        return "\n".join([self.title, HEAD, *rows])

    @property
    def explanation(self) -> str:
        """One line for each strategy that differs."""
        ranks = counted(self.num_ranks, "rank")
        return "\n".join(
            f"{self.model} with {one.strategy} on {ranks} differs from one process: "
            f"{'; '.join(one.differences)} (tolerance {one.tolerance:.0e})"
            for one in self.comparisons
            if not one.ok
        )

    def raise_for_difference(self) -> None:
        """Raise if a strategy differs.

        Raises:
            VerificationError: the message names the strategy, what differs, and by how much.
        """
        if not self.ok:
            raise VerificationError(self.explanation)
