"""Access to what watches the ranks."""

from functools import partial

from shardwise.comm.communicator import Communicator, NewWatch
from shardwise.watch.monitor import Patience
from shardwise.watch.ranks import RankWatch


def watch_of(comm: Communicator) -> RankWatch:
    """Return what watches the ranks of ``comm``."""
    assert isinstance(comm.watch, RankWatch)
    return comm.watch


def watch_with(patience: Patience) -> NewWatch:
    """Return the argument of `communicator` with which ranks wait so long."""
    return partial(RankWatch, patience=patience)
