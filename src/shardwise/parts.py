"""Parts that the engine uses if the package has them.

Without `shardwise.hostccl`, ranks on CPUs use Gloo. Without `shardwise.watch`, a rank that waits
for one that hangs or died waits until the backend gives up.
"""

from importlib.util import find_spec

from shardwise.comm.communicator import use_host_queues, watch_with

__all__: list[str] = []

if find_spec("shardwise.hostccl") is not None:
    from shardwise.features.host_collectives import HostCollectives

    use_host_queues(HostCollectives)

if find_spec("shardwise.watch") is not None:
    from shardwise.watch.ranks import RankWatch

    watch_with(RankWatch)
