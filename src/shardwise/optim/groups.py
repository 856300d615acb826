"""Which parameters of a model are hidden matrices, for optimizers that treat those differently."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from shardwise.errors import PlanError

__all__ = ["parameter_groups"]

# Linear layers that map to classes or words, by the last part of their name.
_HEADS = {"classifier", "embed_out", "head", "lm_head", "output", "score", "unembed"}
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_NAMED = 8  # parameters in an error
_Split = int | tuple[int, ...]


def parameter_groups(
    model: nn.Module,
    *,
    matrices: Iterable[str] = (),
    others: Iterable[str] = (),
    split: Mapping[str, _Split] | None = None,
) -> list[dict[str, Any]]:
    """Groups for `Muon` and `SOAP`: hidden matrices, and all else with ``method="adamw"``.

    Hidden matrices are the weights of linear layers and convolutions, but for a head: a layer with
    as many outputs as an embedding has rows, or with a usual name such as ``lm_head``. Embeddings,
    also those that are tied to a head, vectors and scalars are stepped by AdamW, vectors and
    scalars without weight decay. Fused weights of `nn.MultiheadAttention` and of recurrent layers
    are split.

    Args:
        model: sharded or not.
        matrices: names, or patterns as in `fnmatch`, of parameters that are hidden matrices.
        others: of parameters that are not.
        split: by pattern, into how many matrices (or of which sizes) the outputs of a weight are
            divided, such as ``{"*.qkv.weight": 3}``.

    Raises:
        PlanError: names parameters of modules that this function does not know; or a pattern that
            matches no parameter.
    """
    split = split or {}
    matrices, others = list(matrices), list(others)
    _check_patterns(model, {"matrices": matrices, "others": others, "split": list(split)})
    kinds = _Kinds(model)
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    unknown = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        options = kinds.options_of(parameter)
        if _matches(name, others) or parameter.is_complex():
            options = {"method": "adamw"}
        elif _matches(name, matrices):
            options = {} if options is None or "method" in options else options
        if options is None:
            unknown.append(f"{name} {tuple(parameter.shape)}")
            continue
        if "method" not in options:
            fitting = [pattern for pattern in split if fnmatchcase(name, pattern)]
            options |= {"split": split[fitting[0]]} if fitting else {}
        key = tuple(sorted(options.items()))
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise PlanError(
            f"{', '.join(unknown[:_NAMED])}{more}: whether these are hidden matrices cannot be "
            "told from their modules; name them in matrices= (as [out, in]) or in others= of "
            "sw.optim.parameter_groups"
        )
    return list(groups.values())


def _check_patterns(model: nn.Module, options: Mapping[str, Iterable[str]]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(f"{option}: {pattern!r} matches no parameter of the model")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class _Use:
    """A module that holds a parameter."""

    module: nn.Module
    name: str
    attribute: str


class _Kinds:
    """What the modules of ``model`` use their parameters for."""

    def __init__(self, model: nn.Module) -> None:
        self._uses: dict[int, list[_Use]] = {}
        self._vocabularies = set()
        for name, module in model.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                self._uses.setdefault(id(parameter), []).append(_Use(module, name, attribute))
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                self._vocabularies.add(module.num_embeddings)

    def options_of(self, parameter: Tensor) -> dict[str, Any] | None:
        """The options of its group; None if they cannot be told."""
        if parameter.ndim <= 1:
            return {"method": "adamw", "weight_decay": 0.0}
        found = [self._options(use) for use in self._uses[id(parameter)]]
        others = [one for one in found if one is not None and "method" in one]
        return others[0] if others else found[0]

    def _options(self, use: _Use) -> dict[str, Any] | None:
        module = use.module
        options: dict[str, Any] | None = None
        match module:
            case nn.Embedding() | nn.EmbeddingBag():
                options = {"method": "adamw"}
            case nn.Linear():
                is_head = use.name.rpartition(".")[2] in _HEADS
                is_head = is_head or module.out_features in self._vocabularies
                options = {"method": "adamw"} if is_head else {}
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
                options = {"stacked": False}
            case nn.MultiheadAttention():
                options = {"split": 3} if use.attribute == "in_proj_weight" else {}
            case nn.RNNBase():
                options = {"split": _GATES[module.mode]} if "_hr_" not in use.attribute else {}
            # That of transformers, in GPT-2; a sharded module has a class of its own.
            case _ if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
                options = {"transposed": True}
        return options
