"""A machine with measured rates, as ``shardwise doctor --calibrate`` writes them.

Each kind of operation has a rate, ``seconds = start + flops * per_flop + bytes * per_byte``, fitted
to measurements of several sizes. Each collective has a curve of seconds over bytes. Everything is
measured for several numbers of local ranks, because ranks share memory and, on a CPU, cores::

    compute of 4 ranks with one thread each on 2 cores    takes twice as long as with 4 cores
    a collective between ranks on CPUs                    keeps the cores from computing
"""

import json
from bisect import bisect_left
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import Accelerator, Cluster
from shardwise.forecast.machines.machine import Constants, Group, Machine
from shardwise.forecast.work import Kind, Operation
from shardwise.plan.units import UnitPlan

__all__ = [
    "CalibratedMachine",
    "Calibration",
    "Curve",
    "RanksCalibration",
    "Rate",
    "measured_accelerator",
]

VERSION = 3
_GENERATION = "hopper"  # source of the constants that are not measured
_PAUSED = 1e6  # slowdown of compute while a collective occupies its cores

_Positive = Annotated[float, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rate(_Strict):
    """The duration of an operation as a linear function of FLOPs and bytes."""

    start: _Positive
    per_flop: _Positive = 0.0
    per_byte: _Positive = 0.0

    def seconds(self, flops: float, num_bytes: float) -> float:
        return self.start + flops * self.per_flop + num_bytes * self.per_byte


class Curve(_Strict):
    """Seconds of a collective by bytes, in ascending order."""

    points: Annotated[tuple[tuple[_Positive, _Positive], ...], Field(min_length=1)]

    def seconds(self, num_bytes: float) -> float:
        """Interpolate as a power of the size; beyond the last point, use that point's rate."""
        sizes = [size for size, _ in self.points]
        after = bisect_left(sizes, num_bytes)
        if after == 0:
            return self.points[0][1]
        if after == len(sizes):
            size, seconds = self.points[-1]
            return seconds * num_bytes / size
        (small, least), (large, most) = self.points[after - 1 : after + 1]
        share = log(num_bytes / small) / log(large / small)
        between: float = least ** (1 - share) * most**share
        return between


class RanksCalibration(_Strict):
    """Measurements of several local ranks that run at once.

    Keys end with the bytes of an element: "mm/4", "gather/2". Operations without an entry of their
    own use the entry of their kind. "cast" is a gather within one rank.
    """

    threads: Annotated[int, Field(ge=1)]  # threads per rank
    operation_seconds: _Positive  # host overhead per operation
    step_seconds: _Positive  # what the engine and the optimizer add to a step, on the host
    # What the engine adds to the forward and backward of a unit, on the host: for a unit with one
    # trained parameter, each further flat buffer, and each further trained or frozen parameter.
    unit_seconds: _Positive
    buffer_seconds: _Positive
    trained_seconds: _Positive
    frozen_seconds: _Positive
    parameter_seconds: _Positive  # of the optimizer per parameter, on the host
    operations: dict[str, Rate]
    collectives: dict[str, Curve]
    updates: dict[str, _Positive]  # seconds of an optimizer per byte of gradient shards

    def summary(self) -> str:
        """Describe the main rates in one line."""
        parts = [f"{self.threads} thread{'s' * (self.threads > 1)} each"]
        for key, label in (("mm/4", "float32"), ("mm/2", "bfloat16")):
            rate = self.operations.get(key)
            if rate is not None and rate.per_flop:
                parts.append(f"{label} products {1e-9 / rate.per_flop:,.0f} GFLOP/s")
        copied = self.operations[f"{Kind.MEMORY}/4"].per_byte
        if copied:
            parts.append(f"memory {1e-9 / copied:,.1f} GB/s")
        parts.append(f"{self.operation_seconds * 1e6:,.0f} us per operation")
        parts.append(f"{self.unit_seconds * 1e6:,.0f} us per unit")
        for key in ("gather/4", "reduce/4", "all_reduce/4"):
            if key in self.collectives:
                size, seconds = self.collectives[key].points[-1]
                parts.append(f"{key[:-2].replace('_', '-')} {size / seconds / 1e9:,.1f} GB/s")
        return ", ".join(parts)


def measured_accelerator(
    name: str,
    peak_flops: float,
    fp32_flops: float,
    memory_bytes: int,
    memory_bandwidth: float,
    *,
    link_bandwidth: float,
    num_ranks: int,
) -> dict[str, str | float | int | None]:
    """Return the fields of an `Accelerator` whose ranks are on one node."""
    return {
        "name": name,
        "generation": "measured",
        "peak_flops": peak_flops,
        "fp32_flops": fp32_flops,
        "achievable_flops": peak_flops,
        "multiprocessors": 1,
        "memory_bytes": memory_bytes,
        "memory_bandwidth": memory_bandwidth,
        "link_bandwidth": link_bandwidth,
        "host_bandwidth": memory_bandwidth,
        "watts": 0.0,
        "devices_per_node": num_ranks,
        "node_bandwidth": link_bandwidth,
    }


class Calibration(_Strict):
    """The content of a calibration file."""

    format: str
    version: int
    machine: dict[str, str | int]
    accelerator: dict[str, str | float | int | None]
    cores: int  # CPU cores that the ranks share; 0: each rank has a device
    ranks: Annotated[dict[int, RanksCalibration], Field(min_length=1)]

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read a file that ``shardwise doctor --calibrate`` wrote.

        Raises:
            ConfigError: the file is not a calibration file or is malformed. The message names the
                entry.
        """
        try:
            found = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path}: not a file of `shardwise doctor --calibrate`: {where}: {first['msg']}"
            ) from error
        if found.version != VERSION:
            raise ConfigError(
                f"{path}: version {found.version}, expected {VERSION}; calibrate again"
            )
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CalibratedMachine(Machine):
    """Local ranks with measured rates.

    Attributes:
        calibration: all measurements.
        measured: the measurements with this cluster's number of ranks.
        compute_itemsize: bytes of a gathered element.
        reduce_itemsize: bytes of an element while gradients are reduced.
    """

    calibration: Calibration
    measured: RanksCalibration
    compute_itemsize: int = 4
    reduce_itemsize: int = 4

    @classmethod
    def read(cls, path: Path, num_ranks: int | None = None) -> "CalibratedMachine":
        """Read the machine from a calibration file.

        Args:
            path: file written by ``shardwise doctor --calibrate``.
            num_ranks: a measured number of ranks; None: the largest one.

        Raises:
            ConfigError: the file is malformed or was not measured with that number of ranks.
        """
        calibration = Calibration.read(path)
        ranks = max(calibration.ranks) if num_ranks is None else num_ranks
        if ranks not in calibration.ranks:
            known = ", ".join(map(str, sorted(calibration.ranks)))
            raise ConfigError(
                f"{path}: measured on {known} ranks, not on {ranks}; measure them with "
                f"`shardwise doctor --calibrate {path} --ranks {ranks}`"
            )
        return cls.measured_on(calibration, ranks)

    @classmethod
    def measured_on(cls, calibration: Calibration, ranks: int) -> "CalibratedMachine":
        """Return the machine with one of the measured numbers of ranks."""
        device = Accelerator(**calibration.accelerator)  # type: ignore[arg-type]
        on_cpu, measured = calibration.cores > 0, calibration.ranks[ranks]
        constants = replace(
            Constants.of(_GENERATION),
            interference=_PAUSED if on_cpu else 0.0,
            operation_seconds=0.0 if on_cpu else measured.operation_seconds,
            unit_seconds=0.0 if on_cpu else measured.unit_seconds / 2,
            straggler=0.0,
        )
        word = "rank" if on_cpu else "GPU"
        cluster = Cluster(device, ranks, ranks, device.node_bandwidth, word)
        return cls(cluster, constants, calibration, measured)

    def under(self, configuration: Configuration) -> "CalibratedMachine":
        """Return the machine with the dtypes of ``configuration``."""
        compute = (
            configuration.master_dtype if configuration.autocast else configuration.compute_dtype
        )
        return replace(
            self,
            compute_itemsize=compute.itemsize,
            reduce_itemsize=configuration.reduce_dtype.itemsize,
        )

    @property
    def computes_on_cpu(self) -> bool:
        return bool(self.calibration.cores)

    # -- operations ------------------------------------------------------------------------------

    def operation_seconds(self, operation: Operation) -> float:
        rate = self._rate_of(operation)
        seconds = rate.seconds(operation.flops, operation.num_bytes)
        if self.calibration.cores:  # the cores launch operations as well as compute
            seconds += self.measured.operation_seconds
        return seconds * self._sharing

    def engine_seconds(self, num_parameters: int) -> float:
        if not self.computes_on_cpu:
            return 0.0
        update = num_parameters * self.measured.parameter_seconds
        return (self.measured.step_seconds + update) * self._sharing

    def segment_seconds(self, unit: UnitPlan) -> float:
        if not self.computes_on_cpu:
            return 0.0
        measured, trained = self.measured, unit.trainable_layouts
        num_trained = sum(len(layout.extents) for layout in trained)
        num_frozen = sum(len(layout.extents) for layout in unit.layouts) - num_trained
        seconds = (
            measured.unit_seconds
            + max(0, len(unit.layouts) - 1) * measured.buffer_seconds
            + max(0, num_trained - 1) * measured.trained_seconds
            + num_frozen * measured.frozen_seconds
        )
        return seconds / 2 * self._sharing

    def memory_seconds(self, num_bytes: float) -> float:
        rate = self.measured.operations[f"{Kind.MEMORY}/4"]
        return rate.seconds(0, num_bytes) * self._sharing

    def update_seconds(self, shard_bytes: float, passes: float) -> float:
        seconds = self.measured.updates["adamw"] / _ADAMW_PASSES
        return shard_bytes * passes * seconds * self._sharing

    @property
    def _sharing(self) -> float:
        """Number of threads per core if ranks compute on CPU cores, otherwise 1."""
        if not self.calibration.cores:
            return 1.0
        threads = self.cluster.num_devices * self.measured.threads
        return max(1.0, threads / self.calibration.cores)

    def _rate_of(self, operation: Operation) -> Rate:
        """Look up the rate of the name, or of the kind; in the operation's dtype, or in float32."""
        names, known = (operation.name, operation.kind.value), self.measured.operations
        keys = (f"{name}/{size}" for size in (operation.itemsize, 4) for name in names)
        return next(known[key] for key in keys if key in known)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather_seconds(self, num_bytes: float, group: Group) -> float:
        kind = "gather" if group.size > 1 else "cast"
        return self._collective(kind, self.compute_itemsize, num_bytes)

    def reduce_scatter_seconds(self, num_bytes: float, group: Group) -> float:
        if group.size == 1 < self.cluster.num_devices:
            return 0.0  # the all-reduce over the replicas takes the time
        return self._collective("reduce", self.reduce_itemsize, num_bytes)

    def all_reduce_seconds(self, num_bytes: float, group: Group) -> float:
        if group.size == 1:
            return 0.0
        return self._collective("all_reduce", self.reduce_itemsize, num_bytes)

    def all_to_all_seconds(self, num_bytes: float, group: Group) -> float:
        """Predict the time of a gather in which each rank receives as many bytes."""
        return self._collective("gather", 4, num_bytes) if group.size > 1 else 0.0

    def _collective(self, kind: str, itemsize: int, num_bytes: float) -> float:
        curve = self.measured.collectives.get(f"{kind}/{itemsize}")
        return curve.seconds(num_bytes) if num_bytes and curve is not None else 0.0


_ADAMW_PASSES = 7.0  # as in `timeline`
