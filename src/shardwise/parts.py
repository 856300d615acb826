"""Parts that the engine uses if the package has them.

Without `shardwise.hostccl` and what it is built on, ranks on CPUs use Gloo. Without
`shardwise.watch`, a rank that waits for one that hangs or died waits until the backend gives up.

The engine uses `shardwise.host` and does not import hostccl itself: once a backend is registered,
torch calls groups of "cpu:gloo" "undefined".
"""

from importlib.util import find_spec

from shardwise.comm.communicator import parts

__all__: list[str] = []


def _has(*packages: str) -> bool:
    return all(find_spec(f"shardwise.{package}") is not None for package in packages)


if _has("host", "hostccl"):
    from shardwise.features.host_collectives import HostCollectives
    from shardwise.host.shared_memory import SharedMemory, is_offered

    parts.host_queues = HostCollectives
    parts.shared_memory = SharedMemory if is_offered else None

if _has("watch"):
    from shardwise.watch.ranks import RankWatch

    parts.new_watch = RankWatch
