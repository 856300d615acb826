"""Small programs with streams, and the problems of each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.streams.clock import Event, Stream
from tests.streams.programs import DEVICE
from tests.streams.simulation import Problem, Simulation

__all__ = ["LITMUS", "Litmus"]


@dataclass(frozen=True)
class Litmus:
    """A program and its problems."""

    run: Callable[[Simulation], None]
    expected: tuple[Problem, ...] = ()


def _zeros(size: int = 8) -> Tensor:
    return torch.zeros(size, device=DEVICE)


def _pinned(size: int = 8) -> Tensor:
    return torch.zeros(size, pin_memory=True)


def _two_streams(simulation: Simulation) -> tuple[Stream, Stream]:
    return simulation.current_stream(DEVICE), simulation.new_stream(DEVICE)


def _waits(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    compute.wait_stream(side)
    x.mul_(2)


def _does_not_wait_before(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    with side:
        x.add_(1)
    compute.wait_stream(side)


def _does_not_wait_after(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    x.mul_(2)
    compute.wait_stream(side)


def _only_reads(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        y = x + 1
    x.sum()
    compute.wait_stream(side)
    side.wait_stream(compute)
    del y


def _writes_what_is_read(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    out = _zeros()
    side.wait_stream(compute)
    with side:
        out.copy_(x)
    x.zero_()
    compute.wait_stream(side)


def _halves(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x[:4].add_(1)
    x[4:].add_(1)
    compute.wait_stream(side)


def _more_than_halves(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x[:5].add_(1)
    x[4:].add_(1)
    compute.wait_stream(side)


def _columns(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    columns = x.view(2, 4)
    side.wait_stream(compute)
    with side:
        columns[:, :2].add_(1)
    columns[:, 2:].add_(1)
    compute.wait_stream(side)


def _early_event(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    event = side.record_event()
    with side:
        x.add_(1)
    compute.wait_event(event)
    x.mul_(2)
    compute.wait_stream(side)


def _unrecorded_event(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    compute.wait_event(Event(simulation))
    x.mul_(2)
    compute.wait_stream(side)


def _transitive(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    third = simulation.new_stream(DEVICE)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    third.wait_stream(side)
    compute.wait_stream(third)
    x.mul_(2)


def _other_device(simulation: Simulation) -> None:
    """Waits for the current stream of the current device, not of the tensors' device."""
    x, (_, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(simulation.current_stream())
    with side:
        x.add_(1)
    simulation.current_stream(DEVICE).wait_stream(side)


def _dropped_in_use(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    del x


def _dropped_after_wait(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    compute.wait_stream(side)
    del x


def _dropped_but_recorded(simulation: Simulation) -> None:
    x, (compute, side) = _zeros(), _two_streams(simulation)
    side.wait_stream(compute)
    with side:
        x.add_(1)
    x.record_stream(side)  # type: ignore[arg-type]
    del x


def _made_elsewhere(simulation: Simulation) -> None:
    """Memory of the side stream is dropped while the compute stream uses it."""
    compute, side = _two_streams(simulation)
    with side:
        x = _zeros()
    compute.wait_stream(side)
    x.add_(1)
    del x


def _all_reduce_buffers(simulation: Simulation, *, waits: bool) -> None:
    """FSDP2's HSDP (pytorch#140044): a row's sum is dropped during its all-reduce."""
    compute, scatters = _two_streams(simulation)
    reduces = simulation.new_stream(DEVICE)
    for _ in range(2):
        gradient = _zeros()
        scatters.wait_stream(compute)
        with scatters:
            row = gradient[:4] + gradient[4:]  # the reduce-scatter
        reduces.wait_stream(scatters)
        with reduces:
            row.add_(1)  # the all-reduce
        if waits:
            scatters.wait_stream(reduces)
        compute.wait_stream(scatters)
        del row


def _all_reduce_buffer_reused(simulation: Simulation) -> None:
    _all_reduce_buffers(simulation, waits=False)


def _all_reduce_buffer_kept(simulation: Simulation) -> None:
    _all_reduce_buffers(simulation, waits=True)


def _reads_too_early(simulation: Simulation) -> None:
    x, host = _zeros(), _pinned()
    host.copy_(x, non_blocking=True)
    host.add_(1)
    simulation.synchronize(DEVICE)


def _reads_after_event(simulation: Simulation) -> None:
    x, host = _zeros(), _pinned()
    host.copy_(x, non_blocking=True)
    simulation.current_stream(DEVICE).record_event().synchronize()
    host.add_(1)


def _reads_as_list_too_early(simulation: Simulation) -> None:
    x, host = _zeros(), _pinned()
    host.copy_(x, non_blocking=True)
    host.tolist()
    simulation.synchronize(DEVICE)


def _writes_the_source(simulation: Simulation) -> None:
    x, host = _zeros(), _pinned()
    x.copy_(host, non_blocking=True)
    host.add_(1)
    simulation.synchronize(DEVICE)


def _item(simulation: Simulation) -> None:
    simulation.is_steady = True
    _zeros().sum().item()


def _blocking_copy(simulation: Simulation) -> None:
    x = _zeros()
    simulation.is_steady = True
    x.copy_(_pinned())


def _pageable_copy(simulation: Simulation) -> None:
    x = _zeros()
    simulation.is_steady = True
    torch.ones(8).to(x.device, non_blocking=True)


def _async_copy(simulation: Simulation) -> None:
    x = _zeros()
    simulation.is_steady = True
    x.copy_(_pinned(), non_blocking=True)


def _mask(simulation: Simulation) -> None:
    x = _zeros()
    simulation.is_steady = True
    x[x > 0]


def _mixed(_simulation: Simulation) -> None:
    _zeros().add_(torch.ones(8))


def _number(_simulation: Simulation) -> None:
    _zeros().add_(torch.tensor(1.0))


LITMUS = {
    "waits": Litmus(_waits),
    "does not wait before": Litmus(_does_not_wait_before, (Problem.RACE,)),
    "does not wait after": Litmus(_does_not_wait_after, (Problem.RACE,)),
    "only reads": Litmus(_only_reads),
    "writes what is read": Litmus(_writes_what_is_read, (Problem.RACE,)),
    "halves": Litmus(_halves),
    "more than halves": Litmus(_more_than_halves, (Problem.RACE,)),
    "columns": Litmus(_columns),
    "early event": Litmus(_early_event, (Problem.RACE,)),
    "unrecorded event": Litmus(_unrecorded_event, (Problem.RACE,)),
    "transitive": Litmus(_transitive),
    "other device": Litmus(_other_device, (Problem.RACE,)),
    "dropped in use": Litmus(_dropped_in_use, (Problem.EARLY_FREE,)),
    "dropped after a wait": Litmus(_dropped_after_wait),
    "dropped but recorded": Litmus(_dropped_but_recorded),
    "made elsewhere": Litmus(_made_elsewhere, (Problem.EARLY_FREE,)),
    "all-reduce buffer reused": Litmus(_all_reduce_buffer_reused, (Problem.EARLY_FREE,)),
    "all-reduce buffer kept": Litmus(_all_reduce_buffer_kept),
    "host reads too early": Litmus(_reads_too_early, (Problem.HOST_RACE,)),
    "host reads after the event": Litmus(_reads_after_event),
    "host reads a list too early": Litmus(_reads_as_list_too_early, (Problem.HOST_RACE,)),
    "host writes the source": Litmus(_writes_the_source, (Problem.HOST_RACE,)),
    "item": Litmus(_item, (Problem.SYNC,)),
    "blocking copy": Litmus(_blocking_copy, (Problem.SYNC,)),
    "pageable copy": Litmus(_pageable_copy, (Problem.SYNC,)),
    "asynchronous copy": Litmus(_async_copy),
    "mask": Litmus(_mask, (Problem.SYNC,)),
    "mixed devices": Litmus(_mixed, (Problem.PLACE,)),
    "a number of the host": Litmus(_number),
}
