"""Finds the machine that a text names or that this process runs on."""

import json
import os
from importlib.resources import files
from pathlib import Path

import torch

from shardwise.errors import ConfigError
from shardwise.forecast.machines.calibrated import (
    VERSION,
    CalibratedMachine,
    Calibration,
    RanksCalibration,
    measured_accelerator,
)
from shardwise.forecast.machines.hardware import Cluster, accelerator_of_device, parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.local_devices import name_of

__all__ = ["local_machine", "machine_of", "typical_cpu"]


def machine_of(text: str) -> Machine:
    """Return the machine of a cluster ("64xH100") or of a calibration file ("2xmachine.json").

    Raises:
        ConfigError: no accelerator has that name, or the file is malformed.
    """
    if not str(text).endswith(".json"):
        return Machine.of(parse_cluster(str(text)))
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


def typical_cpu(num_ranks: int) -> Calibration:
    """Return a calibration of ranks on this machine's cores, with rates of typical servers."""
    rates = json.loads((files(__package__) / "typical_cpu.json").read_text("utf-8"))
    del rates["about"]
    measured = RanksCalibration(threads=torch.get_num_threads(), **rates)
    flops, bandwidth = (
        1 / value
        for value in (
            measured.operations["matmul/4"].per_flop,
            measured.operations["memory/4"].per_byte,
        )
    )
    size, seconds = measured.collectives["gather/4"].points[-1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    accelerator = measured_accelerator(
        "CPU", flops, flops, memory, bandwidth, link_bandwidth=size / seconds, num_ranks=num_ranks
    )
    return Calibration(
        format="shardwise calibration",
        version=VERSION,
        machine={},
        accelerator=accelerator,
        cores=os.cpu_count() or 1,
        ranks={num_ranks: measured},
    )
