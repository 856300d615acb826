"""Finds the hidden matrices of a model, for optimizers that treat them differently."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.errors import PlanError

__all__ = ["parameter_groups"]

# Usual names of linear layers that map to classes or words.
_HEADS = {"classifier", "embed_out", "head", "lm_head", "output", "score", "unembed"}
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_MAX_SHOWN = 8  # parameters in an error
_Split = int | tuple[int, ...]


def parameter_groups(
    model: nn.Module,
    *,
    matrices: Iterable[str] = (),
    others: Iterable[str] = (),
    split: Mapping[str, _Split] | None = None,
) -> list[dict[str, Any]]:
    """Divide the parameters of ``model`` into groups for `Muon` and `SOAP`.

    Hidden matrices are the weights of linear layers and convolutions, except for heads: linear
    layers with as many outputs as an embedding has rows, or with a usual name such as ``lm_head``.
    All other parameters are in groups with ``method="adamw"``: embeddings, also if they are tied to
    a head, vectors and scalars, the last two without weight decay. Fused weights of
    `nn.MultiheadAttention` and of recurrent layers are split. Frozen parameters are left out.

    Args:
        model: sharded or not.
        matrices: names, or patterns as in `fnmatch`, of further parameters that are hidden
            matrices.
        others: names or patterns of parameters that are not.
        split: by name or pattern, the number of equal matrices into which the outputs of a weight
            are divided, or their sizes: ``{"*.qkv.weight": 3}``.

    Raises:
        PlanError: this function does not know the module of a parameter, or a pattern matches no
            parameter.
    """
    split = split or {}
    matrices, others = list(matrices), list(others)
    _check_patterns(model, {"matrices": matrices, "others": others, "split": list(split)})
    known = _options_by_parameter(model)
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    unknown = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        options = known[id(parameter)]
        if _matches(name, others) or parameter.is_complex():
            options = {"method": "adamw"}
        elif _matches(name, matrices):
            options = {} if options is None or "method" in options else options
        if options is None:
            unknown.append(f"{name} {tuple(parameter.shape)}")
            continue
        if "method" not in options:
            fitting = [sizes for pattern, sizes in split.items() if fnmatchcase(name, pattern)]
            options = options | {"split": fitting[0]} if fitting else options
        key = tuple(sorted(options.items()))
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if unknown:
        more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
        raise PlanError(
            f"{', '.join(unknown[:_MAX_SHOWN])}{more}: their modules do not show whether these are "
            "hidden matrices; name them in matrices= (as [out, in]) or in others= of "
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


def _options_by_parameter(model: nn.Module) -> dict[int, dict[str, Any] | None]:
    """The options of each parameter's group, by the id of the parameter; None if unknown."""
    vocabularies = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    found: dict[int, dict[str, Any] | None] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            options = _options(name, module, attribute, vocabularies)
            if parameter.ndim <= 1:
                options = {"method": "adamw", "weight_decay": 0.0}
            first = found.setdefault(id(parameter), options)
            if "method" in (options or {}) and "method" not in (first or {}):
                found[id(parameter)] = options  # shared with an embedding, for example
    return found


def _options(
    name: str, module: nn.Module, attribute: str, vocabularies: Collection[int]
) -> dict[str, Any] | None:
    """The options for the parameter ``attribute`` of ``module``, from the use of the module."""
    options: dict[str, Any] | None = None
    match module:
        case nn.Embedding() | nn.EmbeddingBag():
            options = {"method": "adamw"}
        case nn.Linear():
            is_head = name.rpartition(".")[2] in _HEADS or module.out_features in vocabularies
            options = {"method": "adamw"} if is_head else {}
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            options = {"stacked": False}
        case nn.MultiheadAttention():
            options = {"split": 3} if attribute == "in_proj_weight" else {}
        case nn.RNNBase():
            options = {"split": _GATES[module.mode]} if "_hr_" not in attribute else {}
        # transformers' Conv1D, in GPT-2. The class of a sharded module is a subclass.
        case _ if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
            options = {"transposed": True}
    return options
