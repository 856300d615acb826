"""How long operations and collectives take on a cluster.

- *Products of matrices* go in tiles over the multiprocessors, in whole waves; a tile costs its own
  depth and a start. The rate is what large products sustain over a long run. A device with a lower
  power limit than the others of its generation runs slower, since they are all limited by power.
- *Attention kernels* reach a share of the peak that grows with the number of keys.
- *Everything else* moves bytes to and from memory. When compiled, what one operation of a chain
  writes and the next one reads stays in registers.
- *The host* launches operation after operation, so a segment takes at least as long as that.
- *Collectives* are rings that enter each node once: bytes over the slower of the devices' links and
  the share of their node's network, plus a latency for each hop. All-reduces of small messages use
  trees.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.hardware import Accelerator, Cluster, accelerators
from shardwise.forecast.work import Kind, Operation

__all__ = ["Constants", "Group", "Machine", "SegmentCost"]

_TILES = ((256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))  # rows, columns, rate
_SPLITS = (1, 2, 4, 8)  # of the depth, where there are fewer tiles than multiprocessors
_FULL_PRECISION = 4  # bytes of a float32
_POWER_EXPONENT = 0.75  # of the rate: with its clock, the voltage of a device falls, too


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of nominal rates, and seconds."""

    matmul: float  # of the peak: large products over a long run
    flash_forward: float  # of the peak: attention of long causal sequences
    flash_backward: float
    flash1: float  # of these: the kernels before FlashAttention-2
    memory: float
    link: float
    network: float
    host_link: float
    link_hop_seconds: float
    network_hop_seconds: float
    collective_seconds: float  # to start one
    kernel_seconds: float  # on the device, between kernels
    operation_seconds: float  # on the host, to launch one operation
    unit_seconds: float  # on the host, for the hooks of a unit
    interference: float  # by how much compute slows down while a collective runs
    straggler: float  # standard deviation of a rank's step, as a share of it
    product_depth: int  # that a tile's start costs
    attention_keys: int  # with which attention kernels reach half of their rate

    @classmethod
    def of(cls, generation: str) -> "Constants":
        """Those that the package has for a generation of devices."""
        data = _data()
        return cls(**data["common"], **data["generations"][generation])

    def updated(self, changes: dict[str, Any]) -> "Constants":
        """With some of them measured.

        Raises:
            ConfigError: one is not known, or not a positive number.
        """
        names = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in names or not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(
                    f"{name}={value!r}: expected a number for one of {', '.join(sorted(names))}"
                )
        return replace(self, **changes)


@cache
def _data() -> dict[str, Any]:
    text = (files(__package__) / "constants.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of a collective: ``size`` of them, ``stride`` apart."""

    size: int
    stride: int = 1

    def in_node(self, devices_per_node: int) -> int:
        """How many of them are in the same node."""
        return max(1, min(self.size, devices_per_node // self.stride))


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Seconds of a segment, by what it does; ``host`` are those of its launches."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    collective: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        return self.matmul + self.attention + self.memory + self.collective

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)


@dataclass(frozen=True)
class Machine:
    """A cluster and what its devices reach of their nominal rates."""

    cluster: Cluster
    constants: Constants

    @classmethod
    def of(cls, cluster: Cluster, measured: Path | None = None) -> "Machine":
        """The machine model of a cluster, with constants that were measured on it, if any.

        Args:
            cluster: of a known accelerator.
            measured: JSON file with some of `Constants`.

        Raises:
            ConfigError: the file has other entries.
        """
        constants = Constants.of(cluster.accelerator.generation)
        if measured is not None:
            constants = constants.updated(json.loads(measured.read_text(encoding="utf-8")))
        return cls(cluster, constants)

    @property
    def device(self) -> Accelerator:
        return self.cluster.accelerator

    def under(self, configuration: Configuration) -> "Machine":
        """The machine as it runs a configuration."""
        del configuration
        return self

    # -- operations ------------------------------------------------------------------------------

    def operation_seconds(self, operation: Operation, *, is_flash1: bool = False) -> float:
        """Of an operation that is no collective."""
        match operation.kind:
            case Kind.MATMUL:
                return self.matmul_seconds(operation.shape, operation.itemsize, operation.num_bytes)
            case Kind.ATTENTION:
                return self.attention_seconds(operation, is_flash1=is_flash1)
            case _:
                return self.memory_seconds(operation.num_bytes) + self.constants.kernel_seconds

    def matmul_seconds(self, shape: Sequence[int], itemsize: int, num_bytes: int) -> float:
        """Of a product ``(batch, m, n, k)``."""
        batch, m, n, k = shape
        tile_rate = self._rate(self.constants.matmul, itemsize) / self.device.multiprocessors
        best = math.inf
        for rows, columns, quality in _TILES:
            tiles = batch * (-(-m // rows)) * (-(-n // columns))
            for split in _SPLITS:
                waves = -(-tiles * split // self.device.multiprocessors)
                depth = k / split + self.constants.product_depth
                best = min(best, waves * 2 * rows * columns * depth / (quality * tile_rate))
        return max(best, self.memory_seconds(num_bytes)) + self.constants.kernel_seconds

    def attention_seconds(self, operation: Operation, *, is_flash1: bool = False) -> float:
        """Of one attention kernel, forward or backward."""
        is_backward = "backward" in operation.name
        share = self.constants.flash_backward if is_backward else self.constants.flash_forward
        share *= self.constants.flash1 if is_flash1 else 1.0
        _, _, queries, keys, _ = operation.shape
        flops = float(operation.flops)
        if operation.is_causal:
            flops *= (keys - queries / 2) / keys if queries <= keys else 0.5
        share *= keys / (keys + self.constants.attention_keys)
        seconds = flops / self._rate(share, operation.itemsize)
        return (
            max(seconds, self.memory_seconds(operation.num_bytes)) + self.constants.kernel_seconds
        )

    def memory_seconds(self, num_bytes: float) -> float:
        """To read and write as many bytes."""
        return num_bytes / (self.device.memory_bandwidth * self.constants.memory)

    def _rate(self, share: float, itemsize: int) -> float:
        """FLOP/s at a share of the peak."""
        if itemsize >= _FULL_PRECISION:
            return self.device.fp32_flops * share
        peak = self.device.peak_flops * share * _power_share(self.device)
        return peak if itemsize > 1 else 2 * peak

    def update_seconds(self, shard_bytes: float, passes: float) -> float:
        """Of an optimizer that goes over its shards of the gradients as often."""
        return self.memory_seconds(shard_bytes * passes)

    def copy_seconds(self, num_bytes: float) -> float:
        """Between device and host."""
        return num_bytes / (self.device.host_bandwidth * self.constants.host_link)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather_seconds(self, num_bytes: float, group: Group) -> float:
        """Of an all-gather to ``num_bytes`` on each rank."""
        if group.size == 1 or not num_bytes:
            return 0.0
        return self._transfer_seconds(num_bytes, group) + self._ring_latency(group)

    def reduce_scatter_seconds(self, num_bytes: float, group: Group) -> float:
        """Of a reduce-scatter of ``num_bytes`` on each rank."""
        return self.all_gather_seconds(num_bytes, group)

    def all_reduce_seconds(self, num_bytes: float, group: Group) -> float:
        """Of an all-reduce of ``num_bytes`` on each rank."""
        if group.size == 1 or not num_bytes:
            return 0.0
        latency = min(2 * self._ring_latency(group), self._tree_latency(group))
        return 2 * self._transfer_seconds(num_bytes, group) + latency

    def all_to_all_seconds(self, num_bytes: float, group: Group) -> float:
        """Of an all-to-all in which each rank sends ``num_bytes``."""
        if group.size == 1 or not num_bytes:
            return 0.0
        inside = group.in_node(self.cluster.devices_per_node)
        outside = num_bytes * (group.size - inside) / group.size
        link = num_bytes * (inside - 1) / group.size / self._link_rate()
        share = self.cluster.node_bandwidth / self.cluster.devices_per_node
        network = outside / (share * self.constants.network)
        return max(link, network) + self._tree_latency(group)

    def send_seconds(self, num_bytes: float, stride: int) -> float:
        """From one rank to that ``stride`` ranks away, if all ranks of the node send as much."""
        per_node = self.cluster.devices_per_node
        if stride < per_node:
            return num_bytes / self._link_rate() + self.constants.collective_seconds
        rate = self.cluster.node_bandwidth / per_node * self.constants.network
        latency = self.constants.collective_seconds + self.constants.network_hop_seconds
        return num_bytes / rate + latency

    def _transfer_seconds(self, num_bytes: float, group: Group) -> float:
        """For the bytes of a ring; the network of a node is shared by its groups."""
        inside = group.in_node(self.cluster.devices_per_node)
        rate = self._link_rate() if inside > 1 else math.inf
        if group.size > inside:
            share = self.cluster.node_bandwidth * inside / self.cluster.devices_per_node
            rate = min(rate, share * self.constants.network)
        return num_bytes * (group.size - 1) / group.size / rate

    def _link_rate(self) -> float:
        return self.device.link_bandwidth * self.constants.link

    def _ring_latency(self, group: Group) -> float:
        nodes = -(-group.size // group.in_node(self.cluster.devices_per_node))
        outside = nodes - 1
        inside = group.size - 1 - outside
        hops = inside * self.constants.link_hop_seconds
        return (
            self.constants.collective_seconds + hops + outside * self.constants.network_hop_seconds
        )

    def _tree_latency(self, group: Group) -> float:
        inside = group.in_node(self.cluster.devices_per_node)
        nodes = -(-group.size // inside)
        depth = 2 * math.ceil(math.log2(nodes))
        hops = 2 * (inside - 1) * self.constants.link_hop_seconds
        return self.constants.collective_seconds + hops + depth * self.constants.network_hop_seconds

    # -- ranks -----------------------------------------------------------------------------------

    def straggler_factor(self, num_ranks: int) -> float:
        """The expected time of the slowest of so many ranks, for that of a typical one.

        The times of ranks are taken to be normally distributed; the expected maximum is Blom's.
        """
        if num_ranks < 2:  # noqa: PLR2004
            return 1.0
        quantile = (num_ranks - 0.375) / (num_ranks + 0.25)
        return 1.0 + self.constants.straggler * NormalDist().inv_cdf(quantile)


@cache
def _power_share(device: Accelerator) -> float:
    """The power limit of a device, for the highest of its generation with the same peak."""
    alike = [
        one.watts
        for one in accelerators()
        if one.generation == device.generation and one.peak_flops == device.peak_flops
    ]
    share: float = min(1.0, device.watts / max(alike, default=device.watts)) ** _POWER_EXPONENT
    return share
