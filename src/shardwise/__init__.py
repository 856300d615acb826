"""Fully Sharded Data Parallel for PyTorch; ``import shardwise as sw`` and `sw.fully_shard`.

`__all__` contains the names that most programs use. The other names of `shardwise.public`,
including the exceptions, are public as well.
"""

import ast
import pkgutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.public import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "Initialization",
    "MixedPrecisionPolicy",
    "Retention",
    "ShardedTensor",
    "ShardwiseError",
    "Strategy",
    "backward",
    "block",
    "clip_grad_norm_",
    "estimate",
    "fit",
    "full_tensors",
    "fully_shard",
    "gathered",
    "latest",
    "ledger",
    "load",
    "publish",
    "save",
    "sleep",
    "transaction",
    "verify",
    "wake",
]


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used.

    ``--help`` is fast then, and sharding imports neither pydantic nor the libraries of checkpoints.
    """
    module = _modules_of_names().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _counted_for_its_budget() if name == "fit" else nullcontext():
        found = import_module(f"{__name__}.{name}") if module == __name__ else import_module(module)
    return globals().setdefault(name, found if module == __name__ else getattr(found, name))


@cache
def _modules_of_names() -> dict[str, str]:
    """The module of each public name, read from the imports of `shardwise.public`."""
    source = pkgutil.get_data(__name__, "public.py")
    assert source is not None
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _counted_for_its_budget() -> AbstractContextManager[None]:
    from shardwise.forecast.memory.process import count_growth  # noqa: PLC0415 (imports psutil)

    return count_growth()


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules_of_names()})
