"""Importing shardwise and its drop-in does not change torch."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import torch.distributed.checkpoint.state_dict

import shardwise.fsdp

PACKAGE = str(Path(shardwise.__file__).parent)


def test_no_function_of_torch_is_replaced() -> None:
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "torch"]
    assert torch.distributed.checkpoint.state_dict in modules
    with warnings.catch_warnings(action="ignore"):  # reading deprecated names warns
        replaced = [name for module in modules for name in _ours_in(module)]
    assert replaced == []


def _ours_in(module: ModuleType) -> Iterator[str]:
    """Names of functions in ``module`` and its classes whose code is in this package."""
    for name, value in list(vars(module).items()):
        members = vars(value).items() if isinstance(value, type) else [("", value)]
        for member, function in members:
            code = function.__code__ if isinstance(function, FunctionType) else None
            if code is not None and code.co_filename.startswith(PACKAGE):
                yield f"{module.__name__}.{name}.{member}"
