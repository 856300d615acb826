"""A backend of torch.distributed for CPUs, faster than Gloo between processes of one host.

::

    import shardwise.hostccl
    import torch.distributed as dist

    dist.init_process_group("cpu:hostccl")  # or dist.new_group(backend="hostccl")

It needs nothing but torch. Ranks of one host exchange small tensors through sockets, and read large
ones from each other's memory (Linux). All other ranks use Gloo.
"""

import torch.distributed as dist

from shardwise.host.point_to_point import RankLostError
from shardwise.hostccl.group import HostGroup

__all__ = ["HostGroup", "RankLostError"]

dist.Backend.register_backend("hostccl", HostGroup, devices=["cpu"])
