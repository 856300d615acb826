"""Fully Sharded Data Parallel for PyTorch; ``import shardwise as sw`` and `sw.fully_shard`.

`__all__` contains the names that most programs use. The other names of `shardwise.public`,
including the exceptions, are public as well.
"""

from contextlib import AbstractContextManager, nullcontext
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
    "fit",
    "fully_shard",
    "gathered",
    "latest",
    "ledger",
    "load",
    "save",
    "transaction",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import torch and the engine when a name is first used, so that ``--help`` is fast."""
    if not name.startswith("_"):  # `from shardwise import _private` imports a module
        with _counted_for_its_budget() if name == "fit" else nullcontext():
            public = import_module("shardwise.public")
        globals().update({known: getattr(public, known) for known in public.__all__})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _counted_for_its_budget() -> AbstractContextManager[None]:
    from shardwise.forecast.process import count_growth  # noqa: PLC0415 (imports psutil)

    return count_growth()


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("shardwise.public").__all__})
