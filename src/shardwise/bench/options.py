"""The options of the command, and the setting that is sent to every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.forecast.models.transformer import Shape
from shardwise.plan.spelling import did_you_mean
from shardwise.train.config import read_config
from shardwise.train.data import VOCABULARY
from shardwise.train.model import gpt_shape

__all__ = ["DTYPES", "MEASURES", "SIZES", "BenchOptions", "Setting", "check_choices", "read_shape"]

DTYPES = ("fp32", "bf16")
MEASURES = ("time", "traffic", "memory", "units")
# The options set the context. Widths are multiples of 64, the width of a head.
SIZES = {
    "10M": gpt_shape(vocabulary=3_072, context=0, width=384, layers=5, heads=6),
    "50M": gpt_shape(vocabulary=16_384, context=0, width=640, layers=8, heads=10),
    "125M": gpt_shape(vocabulary=50_304, context=0, width=768, layers=12, heads=12),
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    size: str = "10M"  # one of `SIZES`, or a configuration of `shardwise train`
    ranks: int = 2
    dtype: str = "fp32"
    vs: tuple[str, ...] | None = None  # families of peers; None: the default ones
    ours: tuple[str, ...] | None = None  # strategies; None: the default ones
    rounds: int = 8
    sequence: int = 128  # tokens
    batch: int = 2  # sequences per rank and step
    measures: tuple[str, ...] | None = None  # None: only the time
    full: bool = False  # whether defaults are all engines that are installed and suit the ranks
    out: Path | None = None  # a directory; None: a new one under runs/

    def check(self) -> None:
        """Raise a ConfigError if an option has an invalid value."""
        least = {"ranks": 2, "rounds": 2, "sequence": 1, "batch": 1}
        for option, value in least.items():
            got = getattr(self, option)
            if got < value:
                raise ConfigError(f"--{option} {got}: expected {value} or more")
        check_choices("--dtype", (self.dtype,), DTYPES)
        check_choices("--measure", self.measured, MEASURES)

    @property
    def measured(self) -> tuple[str, ...]:
        if self.measures is not None:
            return self.measures
        return MEASURES if self.full else MEASURES[:1]


@dataclass(frozen=True, slots=True)
class Setting:
    size: str
    shape: Shape
    ranks: int
    dtype: str
    engines: tuple[str, ...]  # names of rows, the base first
    rounds: int
    batch: int  # sequences per rank

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bf16"


def read_shape(size: str, sequence: int) -> Shape:
    """Return the model of ``--size``: a row of `SIZES`, or [model] of a configuration file."""
    sizes = {name.lower(): shape for name, shape in SIZES.items()}
    if size.lower() in sizes:
        return replace(sizes[size.lower()], context=sequence)
    if not size.endswith(".toml") and not Path(size).exists():
        raise ConfigError(f"--size {size}: expected {', '.join(SIZES)} or a configuration (.toml)")
    model = read_config(Path(size)).model
    return gpt_shape(VOCABULARY, sequence, model.width, model.layers, model.heads)


def check_choices(option: str, choices: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ConfigError if ``choices`` is empty or has others than the ``known`` values."""
    if not choices:
        raise ConfigError(
            f"{option}: expected one of {', '.join(known)}, or several separated by commas"
        )
    for choice in choices:
        if choice not in known:
            hint = did_you_mean(choice, known) or f"; expected one of {', '.join(known)}"
            raise ConfigError(f"{option} {choice}: unknown{hint}")
