"""Copies of shards from host memory to the device, and of gradients back.

On an accelerator each direction has its own stream, so copies do not queue behind collectives::

    to device  | shard 3 -> buffer | shard 4 -> buffer |
    gather             | all-gather 2 | all-gather 3 |
    compute                    | block 1    | block 2   |
    to host                 | gradients 1 -> host |

On the CPU the thread of the collectives makes the copies, as for shards on the device.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.device import DeviceStream, DeviceWork, copy_, is_accelerator
from shardwise.plan.layout import Layout
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.runtime.memory import Pool

__all__ = ["HostOffloader"]


class HostOffloader:
    """Copies between the host and ``device``, concurrently with compute."""

    def __init__(self, device: torch.device, policy: CPUOffloadPolicy) -> None:
        self._has_streams = is_accelerator(device)
        self._is_pinned = self._has_streams and policy.pin_memory
        self.keeps_copies = not policy.parameters  # of shards, on the device
        self.staging = Pool(torch.device("cpu"), is_pinned=self._is_pinned)
        self._to_device = DeviceStream(device)
        self._to_host = DeviceStream(device)

    def allocate_shard(self, layout: Layout, dtype: str) -> Tensor:
        """Allocate zeros [S] on the host, outside the pool."""
        size = layout.shard_elements
        of = getattr(torch, dtype)
        return torch.zeros(size, dtype=of, device="cpu", pin_memory=self._is_pinned)

    def to_device(self, to: Tensor, of: Tensor) -> Callable[[], None]:
        """Begin to copy to the device. Returns what a collective calls before it reads ``to``."""
        if not self._has_streams:
            return partial(copy_, to, of)
        with self._to_device.enqueue() as work:
            copy_(to, of)
        return work.wait_on_device

    def to_host(self, to: Tensor, of: Tensor) -> DeviceWork:
        """Begin to copy to the host; call `DeviceWork.synchronize` before reading ``to``."""
        with self._to_host.enqueue() as work:
            copy_(to, of)
        return work
