"""Tests of machines with measured rates."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.calibrated import CalibratedMachine
from shardwise.forecast.machines.machine import Group
from shardwise.forecast.work import Kind, Operation
from shardwise.plan.plan import make_plan
from tests.forecast.calibrations import MB, calibration


def machine(tmp_path: Path, ranks: int, cores: int = 2) -> CalibratedMachine:
    path = tmp_path / "machine.json"
    calibration(cores).write(path)
    return CalibratedMachine.read(path, ranks)


def operation(name: str, kind: Kind = Kind.MEMORY, flops: int = 0, itemsize: int = 4) -> Operation:
    return Operation(name, kind, flops, (), itemsize, reads=((0, 600),), writes=((1, 400),))


def test_an_operation_has_the_rate_of_its_name_or_kind(tmp_path: Path) -> None:
    found = machine(tmp_path, 2)
    overhead = 1e-5  # per operation, on the host
    mm = operation("mm", Kind.MATMUL, 10**6)
    half = operation("mm", Kind.MATMUL, 10**6, itemsize=2)
    assert found.operation_seconds(mm) == pytest.approx(overhead + 1e-6 + 1e-5)
    assert found.operation_seconds(half) == pytest.approx(overhead + 1e-6 + 1e-4)
    assert found.operation_seconds(operation("gelu")) == pytest.approx(overhead + 1e-6)
    assert found.operation_seconds(operation("tanh")) == pytest.approx(overhead + 1e-7)
    assert found.operation_seconds(operation("gelu", itemsize=2)) == pytest.approx(overhead + 1e-6)


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    mm = operation("mm", Kind.MATMUL, 10**9)
    two, four = machine(tmp_path, 2), machine(tmp_path, 4)
    assert four.operation_seconds(mm) == 2 * two.operation_seconds(mm)
    assert two.constants.interference > 1000
    on_gpus = machine(tmp_path, 4, cores=0)
    assert on_gpus.constants.interference == 0
    assert on_gpus.operation_seconds(mm) == pytest.approx(two.operation_seconds(mm) - 1e-5)
    assert on_gpus.constants.operation_seconds == 1e-5


def test_the_engine_takes_time_where_the_host_computes(tmp_path: Path) -> None:
    two, on_gpus = machine(tmp_path, 2), machine(tmp_path, 2, cores=0)
    assert two.engine_seconds(num_parameters=10) == pytest.approx(1e-3 + 10 * 1e-6)
    module = nn.ParameterList(nn.Parameter(torch.zeros(2), requires_grad=n < 5) for n in range(8))
    [mixed] = make_plan(module, world_size=2, units=None).units
    # In a forward or a backward: five trained parameters, and three frozen ones in another buffer.
    expected = (1e-4 + 4 * 1e-5 + 2e-5 + 3 * 5e-6) / 2
    assert two.segment_seconds(mixed) == pytest.approx(expected)
    assert on_gpus.engine_seconds(num_parameters=10) == on_gpus.segment_seconds(mixed) == 0
    assert on_gpus.constants.unit_seconds == pytest.approx(1e-4 / 2), (
        "of the host, which runs ahead"
    )


def test_collectives_follow_their_curve_and_dtype(tmp_path: Path) -> None:
    found = machine(tmp_path, 2)
    ranks = Group(2)
    assert found.all_gather_seconds(100, ranks) == 1e-4
    assert found.all_gather_seconds(1 << 15, ranks) == pytest.approx(1e-4 * 10**0.5)
    assert found.all_gather_seconds(4 * MB, ranks) == 4e-3
    assert found.all_gather_seconds(MB, Group(1)) == 0, "nothing was measured for a cast"
    half = found.under(Configuration(reduce_dtype=torch.bfloat16))
    assert found.reduce_scatter_seconds(MB, ranks) == 2e-3
    assert half.reduce_scatter_seconds(MB, ranks) == 3e-3
    assert found.reduce_scatter_seconds(MB, Group(1)) == 0


def test_a_number_of_ranks_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"measured on 2, 4 ranks, not on 3; .* --ranks 3"):
        machine(tmp_path, 3)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"start": 1e-06', '"start": -1', r"ranks\.2\.operations\.mm/4\.start"),
        ('"version": 3', '"version": 7', "version 7, expected 3"),
        ('"threads": 1', '"thread": 1', r"ranks\.2\.threads"),
        ("{", "[", "Invalid JSON"),
    ],
)
def test_a_malformed_file_names_the_entry(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    calibration().write(path)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        CalibratedMachine.read(path, 2)
