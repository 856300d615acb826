"""The names and the values of weights with LoRA adapters, as peft has them in a model."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from shardwise.checkpoint.matching import without_adapter_names

__all__ = ["ADAPTER", "Adapted", "adapted_weights", "alone", "merge"]

ADAPTER = ".lora_"  # in the names of peft's parameters


@dataclass(frozen=True, slots=True)
class Adapted:
    """A weight of a model with adapters; ``low`` and ``high`` are the names of LoRA's A and B."""

    weight: str
    low: str = ""  # empty if the weight has no adapter
    high: str = ""

    @property
    def layer(self) -> str:
        """The name of the module that peft has put around the weight's."""
        return self.low.partition(f"{ADAPTER}A.")[0]


def adapted_weights(names: Collection[str], adapter: str = "default") -> dict[str, Adapted]:
    """The weights among ``names``, by their names in the model without adapters."""
    found = {}
    for name in names:
        if ADAPTER in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        low, high = (f"{layer}{ADAPTER}{matrix}.{adapter}.weight" for matrix in "AB")
        found[without_adapter_names(name)] = Adapted(name, *((low, high) if low in names else ()))
    return found


def alone(names: Collection[str], adapter: str = "default") -> dict[str, str]:
    """The tensors of ``adapter`` among ``names``, by their names in peft's files."""
    found = {}
    for name in names:
        parts = name.split(".")
        for position, part in enumerate(parts[:-1]):
            is_saved = part == "modules_to_save"
            if (is_saved or part.startswith("lora_")) and parts[position + 1] == adapter:
                kept = parts[:position] if is_saved else parts[: position + 1]
                found[".".join((*kept, *parts[position + 2 :]))] = name
    return found


def merge(weight: Tensor, low: Tensor, high: Tensor, scaling: float) -> Tensor:
    """Add an adapter to ``weight`` [m, n] in place; ``low`` is [rank, n] and ``high`` [m, rank]."""
    product = high @ low
    product *= scaling
    weight += product
    return weight
