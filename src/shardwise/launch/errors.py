"""What the trainer raises: two more leaves of the tree in `shardwise.errors`.

::

    ShardwiseError
    ├── ConfigError(ValueError)      a configuration that cannot be run
    └── RankError(RuntimeError)     a rank that was started here ended early
"""

from shardwise.errors import ShardwiseError

__all__ = ["ConfigError", "RankError"]


class ConfigError(ShardwiseError, ValueError):
    """A configuration or a command line that cannot be run; one line that names the key."""


class RankError(ShardwiseError, RuntimeError):
    """A rank that was started here ended early; the message holds its traceback."""
