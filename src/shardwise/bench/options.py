"""The options of the command, and the setting that every rank gets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.plan.spelling import did_you_mean
from shardwise.train.config import read_config
from shardwise.train.data import VOCABULARY
from shardwise.train.model import Shape

__all__ = ["DTYPES", "MEASURES", "SIZES", "BenchOptions", "Setting", "choose_words", "read_shape"]

DTYPES = ("fp32", "bf16")
MEASURES = ("time", "traffic", "memory", "units")
# The context comes from the options. Widths are multiples of 64, the width of a head.
SIZES = {
    "10M": Shape(vocabulary=3_072, context=0, width=384, layers=5, heads=6),
    "50M": Shape(vocabulary=16_384, context=0, width=640, layers=8, heads=10),
    "125M": Shape(vocabulary=50_304, context=0, width=768, layers=12, heads=12),
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The command line."""

    size: str = "10M"  # of `SIZES`, or a configuration of `shardwise train`
    ranks: int = 2
    dtype: str = "fp32"
    vs: tuple[str, ...] | None = None  # families of peers; None for the default ones
    ours: tuple[str, ...] | None = None  # strategies; None for the default ones
    rounds: int = 8
    sequence: int = 128  # tokens
    batch: int = 2  # sequences per rank and step
    measures: tuple[str, ...] | None = None  # None for the time alone
    full: bool = False  # the default ones are all that are installed and suit the ranks
    out: Path | None = None  # a directory; None for a new one under runs/

    def check(self) -> None:
        """Check the values of the options.

        Raises:
            ConfigError: names the option.
        """
        least = {"ranks": 2, "rounds": 2, "sequence": 1, "batch": 1}
        for option, value in least.items():
            got = getattr(self, option)
            if got < value:
                raise ConfigError(f"--{option} {got}: expected {value} or more")
        choose_words("--dtype", (self.dtype,), DTYPES)
        choose_words("--measure", self.measured, MEASURES)

    @property
    def measured(self) -> tuple[str, ...]:
        """What is measured."""
        if self.measures is not None:
            return self.measures
        return MEASURES if self.full else MEASURES[:1]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every rank needs to know. ``engines`` are names of rows, the base first."""

    size: str
    shape: Shape
    ranks: int
    dtype: str
    engines: tuple[str, ...]
    rounds: int
    batch: int  # sequences per rank

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bf16"


def read_shape(size: str, sequence: int) -> Shape:
    """The model of ``--size``: a row of `SIZES`, or the [model] of a configuration file.

    Raises:
        ConfigError: it is neither.
    """
    sizes = {name.lower(): shape for name, shape in SIZES.items()}
    if size.lower() in sizes:
        return replace(sizes[size.lower()], context=sequence)
    if not size.endswith(".toml") and not Path(size).exists():
        raise ConfigError(f"--size {size}: expected {', '.join(SIZES)} or a configuration (.toml)")
    model = read_config(Path(size)).model
    return Shape(VOCABULARY, sequence, model.width, model.layers, model.heads)


def choose_words(option: str, words: Sequence[str], known: Sequence[str]) -> None:
    """Check that ``words`` is a non-empty list of ``known`` words.

    Raises:
        ConfigError: names the ``option`` and the nearest known word.
    """
    if not words:
        raise ConfigError(f"{option}: expected one of {', '.join(known)}, or several by comma")
    for word in words:
        if word not in known:
            hint = did_you_mean(word, known) or f"; expected one of {', '.join(known)}"
            raise ConfigError(f"{option} {word}: unknown{hint}")
