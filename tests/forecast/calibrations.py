"""A calibration to test with."""

from shardwise.forecast.machines.calibrated import (
    Calibration,
    Curve,
    RanksCalibration,
    Rate,
    measured_accelerator,
)

MB = 1 << 20


def calibration(cores: int = 2) -> Calibration:
    measured = RanksCalibration(
        threads=1,
        operation_seconds=1e-5,
        step_seconds=1e-3,
        unit_seconds=1e-4,
        buffer_seconds=2e-5,
        trained_seconds=1e-5,
        frozen_seconds=5e-6,
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
    accelerator = measured_accelerator(
        "this machine", 1e11, 1e11, 1 << 33, 1e10, link_bandwidth=1e9, num_ranks=4
    )
    return Calibration(
        format="shardwise calibration",
        version=3,
        machine={},
        accelerator=accelerator,
        cores=cores,
        ranks={2: measured, 4: measured},
    )
