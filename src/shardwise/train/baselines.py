"""What a loss means: the entropies that a table of counts would reach on the same text."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.train.data import VOCABULARY, Bytes

__all__ = ["Baselines", "measure_baselines"]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Nats per byte, best first reached last; a model below ``bigram`` has learned some order."""

    uniform: float  # nothing is known
    unigram: float  # how frequent each byte is
    bigram: float  # how frequent each byte is after the one before it


def measure_baselines(text: Bytes) -> Baselines:
    """Entropies of ``text``: of a byte, and of a byte given the one before."""
    pairs = text[:-1].astype(np.int64) * VOCABULARY + text[1:]
    previous = _entropy(np.bincount(text[:-1], minlength=VOCABULARY))
    return Baselines(
        uniform=math.log(VOCABULARY),
        unigram=_entropy(np.bincount(text, minlength=VOCABULARY)),
        bigram=_entropy(np.bincount(pairs, minlength=VOCABULARY**2)) - previous,
    )


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
