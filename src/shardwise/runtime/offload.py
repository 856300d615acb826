"""Shards in the memory of the host: on the way to the device, and gradients on the way back.

On a GPU each direction has a stream of its own, so copies queue behind no collective::

    bring   | shard 3 -> slot | shard 4 -> slot |          (stream "bring")
    gather          | all-gather 2 | all-gather 3 |        (lane of the link)
    compute                 | block 1    | block 2   |
    take                 | gradients 1 -> host |           (stream "take")

On the CPU the lane of the link copies, as it does for shards that are there already.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.plan.layout import Layout
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.runtime.memory import Pool
from shardwise.transport.api import Work
from shardwise.transport.device import copy_, host_tensor, make_stream

__all__ = ["Ferry"]


class Ferry:
    """Copies between host and ``device``, beside what is computed there."""

    def __init__(self, device: torch.device, policy: CPUOffloadPolicy) -> None:
        self._is_gpu = device.type == "cuda"
        self._is_pinned = self._is_gpu and policy.pin_memory
        self.staging = Pool(torch.device("cpu"), is_pinned=self._is_pinned)
        self._bring = make_stream(device)
        self._take = make_stream(device)

    def host_shard(self, layout: Layout) -> Tensor:
        """Zeros [S] that stay."""
        dtype: torch.dtype = getattr(torch, layout.dtype)
        return host_tensor(layout.shard_elements, dtype, pinned=self._is_pinned)

    def bring(self, to: Tensor, of: Tensor) -> Callable[[], None]:
        """Begin to fill ``to`` on the device; what a link has to call before it sends that."""
        if not self._is_gpu:
            return partial(copy_, to, of)
        mark = self._bring.submit(partial(copy_, to, of))
        return mark.wait_on_device

    def take(self, to: Tensor, of: Tensor) -> Work:
        """Begin to fill ``to`` on the host; `Work.synchronize` before that is read."""
        return self._take.submit(partial(copy_, to, of))
