"""4-bit weights of bitsandbytes: codes that are packed into other elements, and their scales."""

from collections.abc import Container
from importlib import import_module
from typing import Any

from torch import Tensor

__all__ = ["dequantize", "describes_packed", "packing_of"]


def packing_of(tensor: Tensor) -> Any:
    """How the codes in ``tensor`` are packed: bitsandbytes' QuantState; None if it has none."""
    return getattr(tensor, "quant_state", None)


def describes_packed(name: str, packed: Container[str]) -> bool:
    """Whether ``name`` is what a state dict has of the packing of a weight, such as its scales."""
    layer, _, part = f".{name}".partition(".weight.")
    return bool(part) and f"{layer}.weight".removeprefix(".") in packed


def dequantize(codes: Tensor, packing: Any) -> Tensor:
    """The values [packing.shape] in ``packing.dtype``."""
    functional: Any = import_module("bitsandbytes.functional")
    values: Tensor = functional.dequantize_4bit(codes, packing)
    return values
