"""Finds models and engines to verify, by name or by the user's function."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwise.errors import ConfigError, PackageMissing
from shardwise.forecast.models.functions import find_function
from shardwise.plan.spelling import did_you_mean
from shardwise.verification.engines import ENGINES, Engine
from shardwise.verification.families import FAMILIES
from shardwise.verification.models import Subject
from shardwise.verification.optimizers import OptimizerFn, names, optimizer_fn

__all__ = ["find_engine", "find_optimizer", "find_subjects"]


def find_subjects(model: str | None, built_in: Mapping[str, Subject]) -> list[Subject]:
    """Resolve a name, package.module:function or file.py:function.

    Names are the keys of ``built_in`` and `FAMILIES`. None stands for all of ``built_in``, and "hf"
    for all of `FAMILIES`.

    The user's function returns the fields of `Subject`: model_fn, batch_fn and, optionally,
    loss_fn and units. It is called here and may be called again in other processes.
    """
    if model is None:
        return list(built_in.values())
    if model in built_in:
        return [built_in[model]]
    if model == "hf" or model in FAMILIES:
        PackageMissing.check("transformers", extra="hf", needed_for=model)
    if model == "hf":
        return list(FAMILIES.values())
    if model in FAMILIES:
        return [FAMILIES[model]]
    return [_call(model, _find_function(model, [*built_in, *FAMILIES, "hf"]))]


def find_engine(name: str) -> Engine:
    """Resolve a key of `ENGINES`, package.module:function or file.py:function."""
    return ENGINES.get(name) or _find_function(name, ENGINES)


def find_optimizer(name: str) -> OptimizerFn:
    """Resolve the name of an optimizer, package.module:function or file.py:function."""
    return optimizer_fn(name) if name in names() else _find_function(name, names())


def _find_function(wanted: str, known: Iterable[str]) -> Callable[..., Any]:
    if ":" not in wanted:
        hint = did_you_mean(wanted, known) or ", module:function or file.py:function"
        raise ConfigError(f"{wanted}: expected one of {', '.join(known)}{hint}")
    return find_function(wanted)


def _call(model: str, function: Callable[[], Any]) -> Subject:
    result = function()
    size = ""
    if isinstance(result, (tuple, list)):
        if len(result) in (2, 3, 4) and all(map(callable, result[:2])):
            return Subject(*result)
        size = f" of {len(result)}"
    got = type(result).__name__
    raise ConfigError(
        f"{model} returned {got}{size}: expected (model_fn, batch_fn), (model_fn, batch_fn, "
        "loss_fn) or (model_fn, batch_fn, loss_fn, units)"
    )
