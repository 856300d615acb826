"""The strict group has the restrictions of NCCL."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Problem, Simulation
from tests.streams.strict_group import StrictGroup

OWN, RANKS = 1, 2


@pytest.fixture
def group() -> Iterator[StrictGroup]:
    """The strict group of rank 1 of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=OWN, world_size=RANKS)
    simulation = Simulation()
    try:
        with simulated(simulation):
            yield StrictGroup(simulation, [0, 1], "test", exchanges=False)
    finally:
        dist.destroy_process_group()


def _zeros(size: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=DEVICE)


def _gather_at(slot: int) -> Callable[[StrictGroup], object]:
    def run(group: StrictGroup) -> object:
        whole = _zeros(8)
        return group.all_gather_single(whole, whole[4 * slot : 4 * slot + 4])

    return run


def _scatter_at(slot: int) -> Callable[[StrictGroup], object]:
    def run(group: StrictGroup) -> object:
        whole = _zeros(8)
        return group.reduce_scatter_single(whole[4 * slot : 4 * slot + 4], whole)

    return run


ACCEPTED: dict[str, Callable[[StrictGroup], object]] = {
    "gather in place at the own slot": _gather_at(OWN),
    "reduce in place at the own slot": _scatter_at(OWN),
    "gather": lambda group: group.all_gather_single(_zeros(8), _zeros(4)),
    "gather of 8-bit floats": lambda group: group.all_gather_single(
        _zeros(8, torch.float8_e4m3fn), _zeros(4, torch.float8_e4m3fn)
    ),
    "sum": lambda group: group.allreduce([_zeros()]),
    "nothing": lambda group: group.all_gather_single(_zeros(0), _zeros(0)),
}
REFUSED: dict[str, Callable[[StrictGroup], object]] = {
    "gather in place at another slot": _gather_at(0),
    "reduce in place at another slot": _scatter_at(0),
    "gather into too little": lambda group: group.all_gather_single(_zeros(4), _zeros(4)),
    "gather across dtypes": lambda group: group.all_gather_single(
        _zeros(8), _zeros(4, torch.float64)
    ),
    "host memory": lambda group: group.all_gather_single(_zeros(8), torch.zeros(4)),
    "not contiguous": lambda group: group.allreduce([_zeros(8)[::2]]),
    "complex numbers": lambda group: group.allreduce([_zeros(4, torch.complex64)]),
    "sum of 8-bit floats": lambda group: group.allreduce([_zeros(4, torch.float8_e4m3fn)]),
    "16-bit integers": lambda group: group.allreduce([_zeros(4, torch.int16)]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_nccl_takes_is_taken(group: StrictGroup, name: str) -> None:
    ACCEPTED[name](group)
    assert not group._simulation.found


@pytest.mark.parametrize("name", REFUSED)
def test_what_nccl_refuses_is_found(group: StrictGroup, name: str) -> None:
    REFUSED[name](group)
    assert {found.problem for found in group._simulation.found} == {Problem.NCCL}
