"""Finds the user's function that ``package.module:function`` or ``file.py:function`` names."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from shardwise.errors import ConfigError
from shardwise.plan.spelling import did_you_mean

__all__ = ["find_function"]


def find_function(wanted: str) -> Callable[..., Any]:
    """Import a function or class. Modules in the current directory and that of the file are found.

    Raises:
        ConfigError: the file, module or function does not exist.
    """
    source, _, name = wanted.rpartition(":")
    module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    function = getattr(module, name, None)
    if not callable(function):
        hint = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)])
        raise ConfigError(f"{wanted}: {source} has no function {name!r}{hint}")
    return cast("Callable[..., Any]", function)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected file.py:function")
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    name = f"given_{path.stem}"  # so that a user's types.py does not shadow Python's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        raise ConfigError(
            f"{name}: no such module; install it, or run from the directory that contains it"
        ) from None
