"""The models that `shardwise verify` can be told to verify: built-in ones, and the user's own."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from shardwise.diagnose.models import MODELS, VOCABULARY, Subject, next_token_loss, random_tokens
from shardwise.launch.errors import ConfigError
from shardwise.train.models import GPT, Block, Shape

__all__ = ["BUILT_IN", "find_subjects"]


def _gpt() -> nn.Module:
    return GPT(Shape(vocabulary=VOCABULARY, context=6, width=16, layers=2, heads=2))


BUILT_IN = {"gpt": Subject(_gpt, random_tokens, next_token_loss, Block)} | MODELS


def find_subjects(model: str | None) -> list[Subject]:
    """What MODEL means: a built-in name, package.module:function or file.py:function; None is all.

    The user's function returns what `Subject` has: model_fn, batch_fn and, where they are needed,
    loss_fn and units. It is called here and may be called again in other processes.

    Raises:
        ConfigError: there is no such name, file, module or function, or it returns something else.
    """
    if model is None:
        return list(BUILT_IN.values())
    if model in BUILT_IN:
        return [BUILT_IN[model]]
    source, colon, name = model.rpartition(":")
    if not colon:
        close = difflib.get_close_matches(model, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}?" if close else "or module:function, or file.py:function"
        raise ConfigError(f"{model}: expected one of {', '.join(BUILT_IN)}; {hint}")
    module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{model}: {source} has no function {name!r}")
    return [_ask(model, function)]


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected Python with a function after the colon")
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours, as when Python runs it
    name = f"verified_{path.stem}"  # a file types.py must not hide Python's own
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for themselves there
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as when Python runs a module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise ConfigError(f"{name}: no such module; is it installed, or below here?") from None


def _ask(model: str, function: Callable[[], Any]) -> Subject:
    answer = function()
    if isinstance(answer, (tuple, list)) and len(answer) in (2, 3, 4) and _are_callable(answer[:2]):
        return Subject(*answer)
    got = type(answer).__name__
    size = f" of {len(answer)}" if isinstance(answer, (tuple, list)) else ""
    raise ConfigError(
        f"{model} returned {got}{size}: expected (model_fn, batch_fn), (model_fn, batch_fn, "
        "loss_fn) or (model_fn, batch_fn, loss_fn, units)"
    )


def _are_callable(several: Any) -> bool:
    return all(callable(one) for one in several)
