"""Groups for Muon and SOAP, by the number of dims alone."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def matrix_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices in one group, and vectors and scalars in another, for AdamW."""
    every = list(parameters)
    others = {"params": [p for p in every if p.ndim <= 1], "method": "adamw"}
    return [{"params": [p for p in every if p.ndim > 1]}, others]
