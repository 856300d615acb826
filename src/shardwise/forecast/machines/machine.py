"""Durations of operations and collectives on a cluster.

- *Matrix products* are computed in tiles, in whole waves over the multiprocessors. A tile costs its
  depth plus a constant start. The rate is what large products sustain over a long run. A device
  with a lower power limit than others of its generation is slower, because all are power-limited.
- *Attention kernels* reach a share of the peak that grows with the number of keys.
- *All other operations* are limited by memory bandwidth. In compiled code, intermediate results of
  a chain of operations stay in registers.
- *The host* launches operations one after the other, so a segment takes at least the sum of these
  launches.
- *Collectives* are rings that enter each node once. Their time is the bytes over the slower of the
  device links and the share of the node's network, plus a latency for each hop. All-reduces of
  small messages use trees.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import Accelerator, Cluster, accelerators
from shardwise.forecast.work import Kind, Operation
from shardwise.plan.units import UnitPlan

__all__ = ["Constants", "Group", "Machine", "SegmentCost"]

_TILES = ((256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))  # rows, columns, rate
_SPLITS = (1, 2, 4, 8)  # of the depth (split-K), for fewer tiles than multiprocessors
_FULL_PRECISION = 4  # bytes of a float32
# Share of the rate that 8-bit products reach relative to 16-bit ones. With it, a linear layer of
# 4,096 x 8,192 x 16,384 on an H100 is 1.39 times as fast as in bfloat16, as in torchao's float8
# README (forward and backward, scales per tensor).
_FLOAT8_SHARE = 0.86
# Bytes read and written per element to cast an operand: the largest element is found first, unless
# scales are delayed or those of a row or a block, which one kernel computes and applies. In three
# products there are five casts with scales of tensors, whose gradient is cast once for two.
_FLOAT8_CASTS = {"tensorwise": 5 * 5 / 6, "delayed": 3 * 5 / 6, "rowwise": 3.0, "mxfp8": 3.0}
_POWER_EXPONENT = 0.75  # rate ~ power**0.75, because voltage falls with the clock


@dataclass(frozen=True, slots=True)
class Constants:
    """Achieved shares of nominal rates, and latencies in seconds."""

    matmul: float  # share of the peak for large products over a long run
    flash_forward: float  # share of the peak for attention over long causal sequences
    flash_backward: float
    flash1: float  # factor on both for kernels before FlashAttention-2
    memory: float
    link: float
    network: float
    host_link: float
    link_hop_seconds: float
    network_hop_seconds: float
    collective_seconds: float  # to start a collective
    kernel_seconds: float  # between kernels, on the device
    operation_seconds: float  # to launch an operation, on the host
    unit_seconds: float  # for the hooks of a unit, on the host
    interference: float  # relative slowdown of compute while a collective runs
    straggler: float  # standard deviation of a rank's step time, as a share of it
    product_depth: int  # cost of starting a tile, as additional depth
    attention_keys: int  # number of keys at which attention kernels reach half of their rate

    @classmethod
    def of(cls, generation: str) -> "Constants":
        """Return the package's constants for a generation of devices."""
        data = _data()
        return cls(**data["common"], **data["generations"][generation])


@cache
def _data() -> dict[str, Any]:
    text = (files(__package__) / "constants.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective: ``size`` ranks, ``stride`` apart.

    With ``within``, they are groups like that one, whose first ranks are ``stride`` apart.
    """

    size: int
    stride: int = 1
    within: "Group | None" = None

    @property
    def _runs(self) -> int:
        """The number of ranks, or of groups, that are ``stride`` apart."""
        return self.size if self.within is None else self.size // self.within.size

    def in_node(self, devices_per_node: int) -> int:
        """Return how many of the ranks are in one node."""
        inner = 1 if self.within is None else self.within.in_node(devices_per_node)
        return inner * max(1, min(self._runs, devices_per_node // self.stride))

    def first(self, size: int) -> "Group":
        """Return the first ``size`` of the ranks."""
        if self.within is not None and size <= self.within.size:
            return self.within.first(size)
        return replace(self, size=size)

    def times(self, outer: "Group") -> "Group":
        """Return the ranks of groups like this one, whose first ranks are those of ``outer``."""
        if self.size == 1 or outer.size == 1:
            return outer if self.size == 1 else self
        if outer.within is not None:
            return self.times(outer.within).times(Group(outer._runs, outer.stride))
        if outer.stride == self._runs * self.stride:
            return replace(self, size=self.size * outer.size)
        return Group(self.size * outer.size, outer.stride, self)


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Seconds of a segment.

    ``host`` is the time of its launches, and ``engine`` what the engine adds where the host
    computes.
    """

    by_kind: Mapping[Kind, float]  # on the device
    host: float = 0.0
    engine: float = 0.0

    @property
    def device(self) -> float:
        return sum(self.by_kind.values())

    @property
    def seconds(self) -> float:
        return max(self.device, self.host) + self.engine


@dataclass(frozen=True)
class Machine:
    """A cluster, and the shares of nominal rates that its devices achieve."""

    cluster: Cluster
    constants: Constants

    @classmethod
    def of(cls, cluster: Cluster) -> "Machine":
        """Return the machine model of a cluster, with the package's constants."""
        return cls(cluster, Constants.of(cluster.accelerator.generation))

    @property
    def computes_on_cpu(self) -> bool:
        """Whether ranks compute on CPU cores."""
        return False

    @property
    def device(self) -> Accelerator:
        return self.cluster.accelerator

    def under(self, configuration: Configuration) -> "Machine":
        """Return the machine as it runs a configuration."""
        del configuration
        return self

    # -- operations ------------------------------------------------------------------------------

    def operation_seconds(self, operation: Operation) -> float:
        """Predict an operation that is not a collective."""
        match operation.kind:
            case Kind.MATMUL:
                return self.matmul_seconds(operation.shape, operation.itemsize, operation.num_bytes)
            case Kind.ATTENTION:
                return self.attention_seconds(operation)
            case _:
                return self.memory_seconds(operation.num_bytes) + self.constants.kernel_seconds

    def matmul_seconds(self, shape: Sequence[int], itemsize: int, num_bytes: int) -> float:
        """Predict a matrix product of shape ``(batch, m, n, k)``."""
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

    def check_float8(self, scaling: str) -> None:
        """Raise a PlanError if the device has no products with 8-bit operands."""
        if self.device.peak_fp8_flops is None:
            raise PlanError(f"float8={scaling!r}: {self.device.name} has no 8-bit products")

    def float8_seconds(self, shape: Sequence[int], scaling: str, weight: int) -> float:
        """Predict a product with 8-bit operands, and the casts of 16-bit operands to 8 bits.

        Args:
            shape: (batch, m, n, k).
            scaling: a value of ``Configuration.float8``.
            weight: number of elements of an operand that has 8 bits before.

        Raises:
            PlanError: the device has no such products.
        """
        self.check_float8(scaling)
        batch, m, n, k = shape
        operands, result = batch * (m * k + k * n), batch * m * n
        seconds = self.matmul_seconds(shape, 1, operands + 2 * result)
        cast = self.memory_seconds((operands - weight) * _FLOAT8_CASTS[scaling])
        return seconds + cast + 2 * self.constants.kernel_seconds

    def attention_seconds(self, operation: Operation) -> float:
        """Predict one attention kernel, forward or backward."""
        is_backward = "backward" in operation.name
        share = self.constants.flash_backward if is_backward else self.constants.flash_forward
        _, _, queries, keys, _ = operation.shape
        flops = float(operation.flops)
        if operation.is_causal:
            flops *= (keys - queries / 2) / keys if queries <= keys else 0.5
        share *= keys / (keys + self.constants.attention_keys)
        seconds = flops / self._rate(share, operation.itemsize)
        return (
            max(seconds, self.memory_seconds(operation.num_bytes)) + self.constants.kernel_seconds
        )

    def engine_seconds(self, num_parameters: int) -> float:
        """Predict what the engine and the optimizer add to a step where the host computes.

        Args:
            num_parameters: how many tensors the optimizer updates.
        """
        del num_parameters
        return 0.0

    def segment_seconds(self, unit: UnitPlan) -> float:
        """Predict what the engine adds to a unit's forward or backward where the host computes."""
        del unit
        return 0.0

    def memory_seconds(self, num_bytes: float) -> float:
        """Predict reading and writing ``num_bytes`` in total."""
        return num_bytes / (self.device.memory_bandwidth * self.constants.memory)

    def _rate(self, share: float, itemsize: int) -> float:
        """Return FLOP/s at a share of the peak."""
        if itemsize >= _FULL_PRECISION:
            return self.device.fp32_flops * share
        share *= _power_share(self.device)
        if itemsize > 1:
            return self.device.peak_flops * share
        return (self.device.peak_fp8_flops or 2 * self.device.peak_flops) * share * _FLOAT8_SHARE

    def update_seconds(self, shard_bytes: float, passes: float) -> float:
        """Predict an optimizer that makes ``passes`` passes over its gradient shards."""
        return self.memory_seconds(shard_bytes * passes)

    def copy_seconds(self, num_bytes: float) -> float:
        """Predict a copy between device and host."""
        return num_bytes / (self.device.host_bandwidth * self.constants.host_link)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict an all-gather to ``num_bytes`` on each rank."""
        if group.size == 1 or not num_bytes:
            return 0.0
        return self._transfer_seconds(num_bytes, group) + self._ring_latency(group)

    def reduce_scatter_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict a reduce-scatter of ``num_bytes`` on each rank."""
        return self.all_gather_seconds(num_bytes, group)

    def all_reduce_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict an all-reduce of ``num_bytes`` on each rank."""
        if group.size == 1 or not num_bytes:
            return 0.0
        latency = min(2 * self._ring_latency(group), self._tree_latency(group))
        return 2 * self._transfer_seconds(num_bytes, group) + latency

    def all_to_all_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict an all-to-all in which each rank sends ``num_bytes``."""
        if group.size == 1 or not num_bytes:
            return 0.0
        inside = group.in_node(self.cluster.devices_per_node)
        outside = num_bytes * (group.size - inside) / group.size
        link = num_bytes * (inside - 1) / group.size / self._link_rate()
        share = self.cluster.node_bandwidth / self.cluster.devices_per_node
        network = outside / (share * self.constants.network)
        return max(link, network) + self._tree_latency(group)

    def send_seconds(self, num_bytes: float, stride: int) -> float:
        """Predict a send to the rank ``stride`` away, while all ranks of the node send as much."""
        per_node = self.cluster.devices_per_node
        if stride < per_node:
            return num_bytes / self._link_rate() + self.constants.collective_seconds
        rate = self.cluster.node_bandwidth / per_node * self.constants.network
        latency = self.constants.collective_seconds + self.constants.network_hop_seconds
        return num_bytes / rate + latency

    def _transfer_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict the transfers of a ring, without latency; groups share their node's network."""
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
        """Return the expected time of the slowest of ``num_ranks`` ranks relative to a typical one.

        Step times of ranks are assumed to be normally distributed; the expected maximum is Blom's
        approximation.
        """
        if num_ranks < 2:  # noqa: PLR2004
            return 1.0
        quantile = (num_ranks - 0.375) / (num_ranks + 0.25)
        return 1.0 + self.constants.straggler * NormalDist().inv_cdf(quantile)


@cache
def _power_share(device: Accelerator) -> float:
    """Return the factor on the rate from a device's power limit.

    The limit is compared with the highest one of its generation at the same nominal peak.
    """
    limits = [
        other.watts
        for other in accelerators()
        if other.generation == device.generation and other.peak_flops == device.peak_flops
    ]
    share: float = min(1.0, device.watts / max(limits, default=device.watts)) ** _POWER_EXPONENT
    return share
