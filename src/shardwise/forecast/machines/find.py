"""Finds the machine that a text names or that this process runs on."""

import os
from pathlib import Path

import torch

from shardwise.comm.device import name_of
from shardwise.errors import ConfigError
from shardwise.forecast.machines.calibrated import (
    VERSION,
    CalibratedMachine,
    Calibration,
    Curve,
    RanksCalibration,
    Rate,
)
from shardwise.forecast.machines.hardware import Cluster, accelerator_of_device, parse_cluster
from shardwise.forecast.machines.machine import Machine

__all__ = ["local_machine", "machine_of", "typical_cpu"]


def machine_of(text: str) -> Machine:
    """Return the machine of a cluster ("64xH100") or of a calibration file ("2xmachine.json").

    Raises:
        ConfigError: no accelerator has that name, or the file is malformed.
    """
    if not text.endswith(".json"):
        return Machine.of(parse_cluster(text))
    count, times, path = text.partition("x")
    if times and count.isdecimal():
        return CalibratedMachine.read(Path(path), int(count))
    return CalibratedMachine.read(Path(text))


def local_machine(num_ranks: int) -> Machine:
    """Return the machine of ``num_ranks`` ranks like this one: GPUs of its model, or a typical CPU.

    Raises:
        ConfigError: the package has no data for this GPU.
    """
    if not torch.cuda.is_available():
        return CalibratedMachine.measured_on(typical_cpu(num_ranks), num_ranks)
    name = name_of(torch.device("cuda"))
    found = accelerator_of_device(name)
    if found is None:
        raise ConfigError(
            f"there is no data for the GPU {name!r}; measure it with `shardwise doctor --calibrate "
            'machine.json` and pass cluster="machine.json", or pass a similar cluster, such as '
            f'cluster="{num_ranks}xH100"'
        )
    return Machine.of(Cluster.of(found.name, num_ranks))


# Rates of one rank with one thread, as `shardwise doctor --calibrate` measures them on servers,
# rounded: float32 and 16-bit FLOP/s, bytes/s of memory, seconds per operation, bytes/s sent.
_FLOPS, _HALF_FLOPS, _MEMORY, _OPERATION, _SENT = 5e10, 1e10, 5e9, 2e-5, 2e9
_STEP, _UNIT, _PARAMETER = 1e-3, 3e-4, 5e-6  # seconds that the engine and the optimizer add


def typical_cpu(num_ranks: int) -> Calibration:
    """Return a calibration of ranks on this machine's cores, with rates of typical servers."""
    operations = {
        f"{kind}/{size}": Rate(start=0.0, per_flop=1 / flops, per_byte=1 / _MEMORY)
        for kind in ("matmul", "attention", "memory")
        for size, flops in ((4, _FLOPS), (2, _HALF_FLOPS))
    }
    least, most = 1 << 14, 1 << 24
    curve = Curve(points=((least, 2e-4), (most, 2e-4 + most / _SENT)))
    collectives = {
        f"{name}/{size}": curve for name in ("gather", "reduce", "all_reduce") for size in (2, 4)
    }
    measured = RanksCalibration(
        threads=torch.get_num_threads(),
        operation_seconds=_OPERATION,
        step_seconds=_STEP,
        unit_seconds=_UNIT,
        parameter_seconds=_PARAMETER,
        operations=operations,
        collectives=collectives,
        updates={"adamw": 7 / _MEMORY},
    )
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    accelerator: dict[str, str | float | int | None] = {
        "name": "CPU",
        "generation": "measured",
        "peak_flops": _FLOPS,
        "fp32_flops": _FLOPS,
        "achievable_flops": _FLOPS,
        "multiprocessors": 1,
        "memory_bytes": memory,
        "memory_bandwidth": _MEMORY,
        "link_bandwidth": _SENT,
        "host_bandwidth": _MEMORY,
        "watts": 0.0,
        "devices_per_node": num_ranks,
        "node_bandwidth": _SENT,
    }
    return Calibration(
        format="shardwise calibration",
        version=VERSION,
        machine={},
        accelerator=accelerator,
        cores=cores,
        ranks={num_ranks: measured},
    )
