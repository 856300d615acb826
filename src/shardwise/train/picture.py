"""The loss curve as a picture."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.train.baselines import Baselines
from shardwise.train.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_losses", "running_mean"]

BLUE, ORANGE, GREY = "#2a6fbb", "#d9822b", "#777777"


def draw_losses(path: Path, title: str, records: Sequence[Record], baselines: Baselines) -> None:
    """Draw the loss of each step, its running mean, the validation losses and the baselines.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second, and an optional dependency)

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, running_mean(losses), color=BLUE, linewidth=1.8, label="training")
    validation = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    axes.plot(list(validation), list(validation.values()), "o-", color=ORANGE, label="validation")
    _draw_entropy(axes, f"unigram entropy {baselines.unigram:.2f}", baselines.unigram)
    _draw_entropy(axes, f"bigram entropy {baselines.bigram:.2f}", baselines.bigram)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.2)
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path)


def _draw_entropy(axes: "Axes", label: str, entropy: float) -> None:
    axes.axhline(entropy, color=GREY, linestyle="--", linewidth=1)
    place = axes.get_yaxis_transform()  # the left edge is 0 and the right one 1
    axes.text(0.99, entropy, label, transform=place, ha="right", va="bottom", color=GREY)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean around each value: over a fiftieth of the run, and over less towards its ends.

    A mean of the past alone would lag behind the steep first steps.
    """
    half = max(1, len(values) // 100)
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = sums[index + reach + 1] - sums[index - reach]
        means.append(window / (2 * reach + 1))
    return means
