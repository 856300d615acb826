"""Everything that shardwise raises, as one tree.

::

    ShardwiseError
    ├── PlanError(ValueError)            the model, units, strategy or mesh do not fit together
    ├── ShardedTensorError(RuntimeError) an operation that a shard alone cannot answer
    └── StepError(RuntimeError)          a step ended for every rank of the mesh
        ├── RanksDiverged                ranks wait for different things
        ├── PeerAborted                  another rank raised; its message is in this one
        └── PeerLost                     another rank is gone or its connection broke
"""

__all__ = [
    "PeerAborted",
    "PeerLost",
    "PlanError",
    "RanksDiverged",
    "ShardedTensorError",
    "ShardwiseError",
    "StepError",
]


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class PlanError(ShardwiseError, ValueError):
    """A model, a wrap choice, a strategy or a mesh that do not fit together."""


class ShardedTensorError(ShardwiseError, RuntimeError):
    """An operation on a sharded parameter that no rank can answer from its shard.

    Not a TypeError: Python's operators would swallow it and say "unsupported operand type(s)".
    """


class StepError(ShardwiseError, RuntimeError):
    """A step ended early, on every rank; the model is usable and the next step may begin."""


class RanksDiverged(StepError):
    """Ranks wait for different things, so none of them can go on."""


class PeerAborted(StepError):
    """Another rank raised in the middle of a step."""


class PeerLost(StepError):
    """Another rank died or its connection broke; the process group cannot be used again."""
