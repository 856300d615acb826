"""Options of adapters on a frozen model (LoRA, DoRA, QLoRA), as text or from peft."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.forecast.options import options_of

__all__ = [
    "ALL_LINEAR",
    "Adapters",
    "adapters_of",
    "of_peft",
    "parse_adapters",
]

ALL_LINEAR = "all-linear"  # all linear layers but the output head


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of low rank on linear layers.

    Args:
        rank: rank of the update of each weight.
        targets: as in peft, last parts of the names of layers, such as ("q_proj",); or a text:
            "all-linear", or a regular expression for whole names.
        alpha: updates are scaled by alpha / rank; it changes no forecast.
        dropout: probability with which inputs of adapters are dropped.
        dora: whether magnitudes of the rows of weights are trained, too (DoRA).
        quantized: whether the base has 4-bit weights (NF4, with quantized scales).
    """

    rank: int = 16
    targets: str | tuple[str, ...] = ALL_LINEAR
    alpha: float = 16
    dropout: float = 0.0
    dora: bool = False
    quantized: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"r={self.rank}: expected a rank of 1 or more")
        if not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha):
            raise ConfigError(f"alpha={self.alpha}: expected a number")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}: expected 0 or more, and less than 1")
        if not isinstance(self.dora, bool):
            raise ConfigError(f"dora={self.dora}: expected true or false")
        if not self.targets:
            raise ConfigError('targets: expected names of layers, or "all-linear"')

    def __str__(self) -> str:
        kind = ("Q" * self.quantized) + ("DoRA" if self.dora else "LoRA")
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        return f"{kind} of rank {self.rank} on {targets}"


_OPTIONS = ("r", "alpha", "targets", "dropout", "dora")


def parse_adapters(text: str, *, quantized: bool = False) -> Adapters:
    """Parse "r=16,targets=q_proj+v_proj,dora=true", or read the adapter_config.json of peft.

    Args:
        text: options separated by commas, names of targets by "+" (other texts are regular
            expressions), a file, or a directory with an adapter_config.json.
        quantized: whether the base has 4-bit weights.

    Raises:
        ConfigError: an option is not known, or a value is malformed.
    """
    path = Path(text)
    if path.suffix == ".json" or (text and path.is_dir()):
        return _read(path / "adapter_config.json" if path.is_dir() else path, quantized=quantized)
    example = "r=16,targets=q_proj+v_proj, or a file of peft"
    found = options_of("lora", text, _OPTIONS, example)
    targets, rank = str(found.pop("targets", ALL_LINEAR)), found.pop("r", 16)
    names = tuple(targets.split("+"))
    are_names = all(re.fullmatch(r"[\w.]*\w", name) for name in names)
    return Adapters(
        rank=rank, targets=names if are_names else targets, quantized=quantized, **found
    )


def adapters_of(lora: Any, *, qlora: bool) -> Adapters:
    """Return the adapters of a user's options.

    Args:
        lora: a text as for `parse_adapters`, peft's LoraConfig or its fields, `Adapters`, or None.
        qlora: whether the base has 4-bit weights.
    """
    if lora is None:
        return Adapters(quantized=qlora)
    if isinstance(lora, Adapters):
        return replace(lora, quantized=lora.quantized or qlora)
    if isinstance(lora, str):
        return parse_adapters(lora, quantized=qlora)
    if not isinstance(lora, Mapping) and not hasattr(lora, "to_dict"):
        raise ConfigError(f"lora={lora!r}: expected options such as 'r=16', or peft's LoraConfig")
    return of_peft(lora if isinstance(lora, Mapping) else lora.to_dict(), quantized=qlora)


def _read(path: Path, *, quantized: bool) -> Adapters:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--lora {path}: {error.strerror}; expected options such as r=16, or the "
            "adapter_config.json of peft"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--lora {path}: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--lora {path}: expected the fields of peft's LoraConfig")
    return of_peft(fields, quantized=quantized)


# Options that add, leave out or change trained parameters; "none" and empty ones do not.
_NOT_MODELLED = (
    "modules_to_save", "layers_to_transform", "exclude_modules", "rank_pattern", "bias",
    "layer_replication", "target_parameters", "trainable_token_indices", "lora_bias",
)  # fmt: skip


def of_peft(fields: Mapping[str, Any], *, quantized: bool = False) -> Adapters:
    """Return the adapters of the fields of peft's LoraConfig.

    Raises:
        ConfigError: it is no LoRA, or it has options that are not modelled.
    """
    for name in _NOT_MODELLED:
        value = fields.get(name)
        is_layer = isinstance(value, int) and not isinstance(value, bool)  # 0 is the first one
        if is_layer or (value or "none") != "none":
            raise ConfigError(
                f"{name}={fields[name]!r} of peft's LoraConfig is not modelled; pass the adapted "
                "model instead: sw.estimate(peft.get_peft_model(model, config), ...)"
            )
    if str(fields.get("peft_type", "LORA")).rpartition(".")[2] != "LORA":
        raise ConfigError(f"peft_type={fields['peft_type']}: expected LORA")
    targets = fields.get("target_modules") or ALL_LINEAR
    if not isinstance(targets, Collection):
        raise ConfigError(f"target_modules={targets!r}: expected names of layers")
    return Adapters(
        rank=fields.get("r", 8),
        alpha=fields.get("lora_alpha", 8),
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
        dropout=fields.get("lora_dropout", 0.0),
        dora=bool(fields.get("use_dora", False)),
        quantized=quantized,
    )
