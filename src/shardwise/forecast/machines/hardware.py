"""Accelerators, with the numbers of their data sheets, and clusters such as ``64xH100``.

The data is in ``hardware.json``, with a source for each accelerator.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.spelling import did_you_mean, simplified

__all__ = [
    "Accelerator",
    "Cluster",
    "accelerator",
    "accelerator_of_device",
    "accelerators",
    "parse_cluster",
]

_GIGA, _TERA, _GIB = 1e9, 1e12, 1 << 30
_USABLE = 0.985  # usable share of nominal memory if unknown; typical of those that are known
_BITS = 8


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. Rates are per second; bandwidths are nominal and in one direction."""

    name: str
    generation: str  # devices of one generation share kernel efficiencies
    peak_flops: float  # dense, 16 bits
    fp32_flops: float  # without tensor cores
    achievable_flops: float | None  # best measured matrix product in 16 bits
    multiprocessors: int
    memory_bytes: int  # memory visible to a process
    memory_bandwidth: float
    link_bandwidth: float  # to the other devices of the node
    host_bandwidth: float
    watts: float
    devices_per_node: int
    node_bandwidth: float  # all network adapters of a node, unless the cluster differs
    aliases: tuple[str, ...] = ()
    peak_fp8_flops: float | None = None  # dense, 8 bits; None: there are no such products


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with identical devices."""

    accelerator: Accelerator
    num_devices: int
    devices_per_node: int
    node_bandwidth: float  # bytes per second of a node's network adapters, in one direction
    device_word: str = "GPU"  # name of a device in messages; "rank" if ranks share CPUs

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.devices_per_node < 1:
            raise ConfigError(
                f"a cluster of {self.num_devices} devices, {self.devices_per_node} per node: "
                "expected 1 or more of each"
            )
        if self.node_bandwidth <= 0:
            raise ConfigError("a cluster's network with 0 Gbit/s per node: expected more than 0")

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.accelerator.name}"

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including an incomplete last one."""
        return -(-self.num_devices // self.devices_per_node)

    @classmethod
    def of(
        cls,
        name: str,
        num_devices: int,
        devices_per_node: int | None = None,
        node_gbps: float | None = None,
    ) -> "Cluster":
        """Return a cluster of the accelerator ``name``; None stands for its usual nodes.

        Raises:
            ConfigError: no accelerator has that name.
        """
        device = accelerator(name)
        per_node = device.devices_per_node if devices_per_node is None else devices_per_node
        bandwidth = device.node_bandwidth if node_gbps is None else node_gbps * _GIGA / _BITS
        return cls(device, num_devices, per_node, bandwidth)


_CLUSTER = re.compile(
    r"(?P<count>\d+)\s*[xX*]\s*(?P<name>[^/:]+?)(/(?P<per_node>\d+))?(:(?P<gbps>\d+(\.\d+)?))?"
)


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster in the form ``COUNTxNAME[/DEVICES_PER_NODE][:GBPS_PER_NODE]``.

    ``64xH100`` is 8 nodes with 3,200 Gbit/s each; ``64xA100-40GB/4:400`` is 16 nodes with 400.

    Raises:
        ConfigError: ``text`` does not have that form, or no accelerator has that name.
    """
    found = _CLUSTER.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"cluster {text!r}: expected COUNTxNAME[/DEVICES_PER_NODE][:GBPS_PER_NODE], such as "
            "64xH100 or 64xA100-40GB/8:1600"
        )
    per_node, gbps = found["per_node"], found["gbps"]
    return Cluster.of(
        found["name"].strip(),
        int(found["count"]),
        None if per_node is None else int(per_node),
        None if gbps is None else float(gbps),
    )


def accelerator(name: str) -> Accelerator:
    """Return the accelerator with this name or alias; case, dashes and spaces do not matter.

    Raises:
        ConfigError: there is none.
    """
    names = {alias: one for one in accelerators() for alias in (one.name, *one.aliases)}
    for alias, found in names.items():
        if simplified(alias) == simplified(name):
            return found
    known = ", ".join(one.name for one in accelerators())
    raise ConfigError(
        f"accelerator {name!r} is not known{did_you_mean(name, names)}; expected one of {known}"
    )


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """Return the accelerator that torch calls ``device_name``, such as "NVIDIA H100 80GB HBM3".

    If several accelerators have this model number, the one that shares the most words is returned.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))

    def common(device: Accelerator) -> int:
        return len(words.intersection(device.name.lower().split("-")))

    found = [device for device in accelerators() if words & _models(device)]
    return max(found, key=common, default=None)


def _models(device: Accelerator) -> set[str]:
    """Return model numbers such as "h100": the first word with digits in the name and aliases."""
    names = (device.name, *device.aliases)
    words = (re.search(r"[a-z]*\d+\w*", name.lower()) for name in names)
    return {word.group() for word in words if word is not None}


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Return all accelerators that the package has data for."""
    text = (files(__package__) / "hardware.json").read_text(encoding="utf-8")
    return tuple(_accelerator(entry) for entry in json.loads(text)["accelerators"])


def _accelerator(entry: dict[str, Any]) -> Accelerator:
    def scaled(key: str, unit: float) -> Any:
        return None if entry[key] is None else entry[key] * unit

    same = ("name", "generation", "multiprocessors", "watts", "devices_per_node")
    return Accelerator(
        **{key: entry[key] for key in same},
        aliases=tuple(entry["aliases"]),
        peak_flops=scaled("peak_tflops", _TERA),
        peak_fp8_flops=scaled("peak_fp8_tflops", _TERA),
        fp32_flops=scaled("fp32_tflops", _TERA),
        achievable_flops=scaled("achievable_tflops", _TERA),
        memory_bytes=int(scaled("usable_gib", _GIB) or entry["memory_gb"] * _USABLE * _GIB),
        memory_bandwidth=scaled("memory_gb_per_s", _GIGA),
        link_bandwidth=scaled("link_gb_per_s", _GIGA),
        host_bandwidth=scaled("host_gb_per_s", _GIGA),
        node_bandwidth=scaled("node_gbps", _GIGA) / _BITS,
    )
