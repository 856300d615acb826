"""A calibration to test with."""

from shardwise.forecast.machines.calibrated import (
    Calibration,
    Curve,
    RanksCalibration,
    Rate,
)

MB = 1 << 20


def calibration(cores: int = 2) -> Calibration:
    measured = RanksCalibration(
        threads=1,
        operation_seconds=1e-5,
        step_seconds=1e-3,
        unit_seconds=1e-4,
        parameter_seconds=1e-6,
        operations={
            "mm/4": Rate(start=1e-6, per_flop=1e-11),
            "mm/2": Rate(start=1e-6, per_flop=1e-10),
            "attention/4": Rate(start=0, per_flop=2e-11),
            "gelu/4": Rate(start=0, per_byte=1e-9),
            "memory/4": Rate(start=0, per_byte=1e-10),
        },
        collectives={
            "gather/4": Curve(points=((1 << 10, 1e-4), (MB, 1e-3))),
            "reduce/4": Curve(points=((MB, 2e-3),)),
            "reduce/2": Curve(points=((MB, 3e-3),)),
        },
        updates={"adamw": 1e-9},
    )
    accelerator: dict[str, str | float | int | None] = {
        "name": "this machine",
        "generation": "measured",
        "peak_flops": 1e11,
        "fp32_flops": 1e11,
        "achievable_flops": 1e11,
        "multiprocessors": 1,
        "memory_bytes": 1 << 33,
        "memory_bandwidth": 1e10,
        "link_bandwidth": 1e9,
        "host_bandwidth": 1e10,
        "watts": 0.0,
        "devices_per_node": 4,
        "node_bandwidth": 1e9,
    }
    return Calibration(
        format="shardwise calibration",
        version=2,
        machine={},
        accelerator=accelerator,
        cores=cores,
        ranks={2: measured, 4: measured},
    )
