"""The exceptions of shardwise, as one tree.

::

    ShardwiseError
    ├── PlanError(ValueError)            the model, units, strategy or mesh do not fit together
    │   └── NotMaterialized(RuntimeError)    parameters are still on the meta device
    ├── ShardedTensorError(RuntimeError) an operation that a shard alone cannot answer
    ├── CheckpointError(RuntimeError)    a checkpoint that cannot be written, read or used
    │   ├── CheckpointDamaged            its bytes differ from those that were saved
    │   └── CheckpointNotFound           the path has no complete checkpoint
    ├── ConfigError(ValueError)          a configuration or command line that cannot be run
    │   └── PackageMissing(ImportError)  an optional dependency is not installed
    ├── RankError(RuntimeError)          a rank that this process started raised or died
    └── StepError(RuntimeError)          a step ended for every rank of the mesh
        ├── RanksDiverged                ranks wait for different things
        ├── PeerAborted                  another rank raised; its message is in this one
        └── PeerLost                     another rank died or its connection broke
            └── PeerSilent               another rank's process does not respond, and may resume
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "ConfigError",
    "NotMaterialized",
    "PackageMissing",
    "PeerAborted",
    "PeerLost",
    "PeerSilent",
    "PlanError",
    "RankError",
    "RanksDiverged",
    "ShardedTensorError",
    "ShardwiseError",
    "StepError",
]


def install(extra: str) -> str:
    """What installs ``extra``. shardwise is not published, so pip cannot find it by its name."""
    return f"pip install '.[{extra}]' in a clone of shardwise"


def ranges(ranks: Sequence[int]) -> str:
    """Return ascending ``ranks`` as text, such as "0-6, 8"."""
    runs = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in ends)


class ShardwiseError(Exception):
    """Base class of the errors that shardwise raises."""


class PlanError(ShardwiseError, ValueError):
    """The model, units, strategy or mesh do not fit together."""


class NotMaterialized(PlanError, RuntimeError):
    """Parameters are still on the meta device; a RuntimeError, as in FSDP2."""


class ShardedTensorError(ShardwiseError, RuntimeError):
    """An operation on a sharded parameter that no rank can compute from its shard alone.

    This is not a TypeError, because Python's operators would swallow one and report
    "unsupported operand type(s)".
    """


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint cannot be written, read or used. A failed save leaves the model unchanged."""


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint are missing or differ from those that were saved."""


class CheckpointNotFound(CheckpointError):
    """There is no complete checkpoint at the path or URL."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration or command line is invalid; the message is one line that names the key."""


class PackageMissing(ConfigError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""

    @classmethod
    def check(cls, package: str, *, extra: str, needed_for: str) -> None:
        """Raise this error unless ``package`` is installed, without importing it."""
        if find_spec(package) is None:
            raise cls(f"{needed_for}: {package} is not installed; {install(extra)}")


class RankError(ShardwiseError, RuntimeError):
    """A rank that this process started raised or died; the message has its traceback."""


class StepError(ShardwiseError, RuntimeError):
    """A step ended early on every rank; the model stays usable and the next step may begin."""


class RanksDiverged(StepError):
    """Ranks wait for different things, so none of them can continue."""


class PeerAborted(StepError):
    """Another rank raised in the middle of a step."""


class PeerLost(StepError):
    """Another rank died or its connection broke; the process group cannot be used again."""


class PeerSilent(PeerLost):
    """Another rank's process does not respond; if it resumes, the process group works again."""
