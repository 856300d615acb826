"""A process group with the restrictions of NCCL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.streams.clock import Stream, Timeline
from tests.streams.exchange import Exchange
from tests.streams.memory import byte_runs
from tests.streams.raw import raw
from tests.streams.simulation import Collective, Problem, Simulation, location

__all__ = ["StrictGroup"]

# torch's ProcessGroupNCCL supports these in every collective, and 8-bit floats in gathers only.
_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}
_MOVED = _DTYPES | {
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
}


_Move = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # from the inputs to the outputs


class StrictGroup:
    """A `ProcessGroupNCCL` on the device of a simulation.

    A collective runs on the current stream, as a synchronous one of NCCL does. All collectives of a
    group must run on one stream, or their order could differ between ranks.
    """

    def __init__(
        self,
        simulation: Simulation,
        ranks: list[int],
        name: str,
        *,
        exchanges: bool,
    ) -> None:
        self._simulation = simulation
        self._ranks = ranks
        self._name = name
        self._own = ranks.index(dist.get_rank())
        self._is_refused = False
        self._exchange = Exchange(name, self._own, len(ranks)) if exchanges else None
        self._is_aborted = False
        self._timeline: Timeline | None = None

    def rank(self) -> int:
        return self._own

    def size(self) -> int:
        return len(self._ranks)

    @property
    def group_name(self) -> str:
        return self._name

    def abort(self) -> None:
        """End running collectives, without results."""
        self._is_aborted = True
        if self._exchange is not None:
            self._exchange.is_aborted = True

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> "_Done":
        self._check("all_gather", [output, own], options, _MOVED)
        if output.numel() != own.numel() * self.size():
            self._refuse("all_gather", f"{own.numel()} elements of each rank, {output.numel()} all")
        self._check_slot("all_gather", output, own)
        return self._run("all_gather", [own], [output], _each(self._gather))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> "_Done":
        self._check("reduce_scatter", [output, whole], options, _DTYPES)
        if whole.numel() != output.numel() * self.size():
            self._refuse("reduce_scatter", f"{whole.numel()} elements to {output.numel()} each")
        self._check_slot("reduce_scatter", whole, output)
        operator = _Operator.read(options)
        name = f"reduce_scatter {operator.name}"
        return self._run(name, [whole], [output], _each(partial(self._scatter, operator)))

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> "_Done":
        self._check("all_reduce", tensors, options, _DTYPES)
        operator = _Operator.read(options)
        name = f"all_reduce {operator.name}"
        return self._run(name, tensors, tensors, _each(partial(self._reduce, operator)))

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: list[int],
        own_sizes: list[int],
        options: Any = None,
    ) -> "_Done":
        self._check("all_to_all", [output, own], options, _MOVED)
        if output_sizes or own_sizes or output.numel() != own.numel() or own.numel() % self.size():
            self._refuse("all_to_all", f"{own.numel()} elements to {output.numel()}")
        return self._run("all_to_all", [own], [output], _each(self._swap))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], owns: list[Tensor], options: Any = None) -> "_Done":
        self._check("all_to_all", [*outputs, *owns], options, _MOVED)
        if not len(outputs) == len(owns) == self.size():
            self._refuse("all_to_all", f"{len(owns)} tensors to {len(outputs)}")
        return self._run("all_to_all", owns, outputs, self._swap_uneven, is_uneven=True)

    # -- what NCCL requires ------------------------------------------------------------------------

    def _refuse(self, operation: str, why: str) -> None:
        self._is_refused = True
        self._simulation.report(Problem.NCCL, f"{operation} in {location()}: {why}")

    def _check(
        self, operation: str, tensors: list[Tensor], options: Any, dtypes: set[torch.dtype]
    ) -> None:
        places = {self._simulation.place_of(tensor) for tensor in tensors if tensor.numel()}
        for place in places:
            if not place.is_device:
                self._refuse(operation, "a tensor is in host memory")
        if len(places) > 1:
            self._refuse(operation, f"tensors at several places: {places}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                self._refuse(operation, "a tensor is not contiguous")
            if tensor.dtype not in dtypes:
                self._refuse(operation, f"no {tensor.dtype}")
        if len({tensor.dtype for tensor in tensors}) > 1:
            self._refuse(operation, "tensors of several dtypes")
        if getattr(options, "asyncOp", False):
            self._refuse(operation, "asynchronous, which this group does not know")

    def _check_slot(self, operation: str, whole: Tensor, part: Tensor) -> None:
        """Check that an in-place operand is at the slot of this rank."""
        if not part.numel():
            return
        (start, stop), *_ = byte_runs(part)
        (first, last), *_ = byte_runs(whole)
        slot = first + self._own * (stop - start)
        if start < last and first < stop and start != slot:
            self._refuse(operation, f"in place at byte {start - first}, expected {slot - first}")

    def _place(self, operation: str, tensor: Tensor) -> str:
        """The window and offset of a buffer that must be in registered memory.

        In the first steps it may be elsewhere: registered memory is planned from them.
        """
        is_asked_for = self._simulation.num_registered > 0 and self._simulation.is_planned
        if not is_asked_for or operation.endswith("max") or tensor.numel() <= 1:
            return ""
        block = self._simulation.memory.block_at(tensor.data_ptr())
        if block is None or block.window is None:
            self._refuse(operation, "a buffer is not in registered memory")
            return ""
        # Only symmetric memory has the same window on all ranks.
        return f"{block.window}, byte {tensor.data_ptr() - block.start}" if block.window else ""

    # -- running -----------------------------------------------------------------------------------

    def _run(
        self,
        operation: str,
        reads: list[Tensor],
        writes: list[Tensor],
        move: _Move,
        *,
        is_uneven: bool = False,
    ) -> "_Done":
        if self._is_aborted:
            raise dist.DistBackendError(f"{operation}: the communicator was aborted")
        simulation = self._simulation
        num_bytes = 0 if is_uneven else sum(one.numel() * one.element_size() for one in reads)
        places = {one.numel(): self._place(operation, one) for one in (*reads, *writes)}
        simulation.collectives.append(
            Collective(
                self._name,
                tuple(self._ranks),
                operation,
                num_bytes,
                places[max(places)],
                simulation.is_planned,
            )
        )
        timeline = simulation.timeline_for([simulation.place_of(one) for one in writes])
        number = simulation.begin(timeline)
        what = f"{operation} in {location()}"
        if self._timeline not in (None, timeline):
            simulation.report(Problem.NCCL, f"{what}: {self._name} is used on {self._timeline} too")
        self._timeline = timeline
        for tensor in reads:
            simulation.use(tensor, timeline, number, what, is_write=False)
        for tensor in writes:
            simulation.use(tensor, timeline, number, what, is_write=True)
        with _disable_current_modes():
            sources, targets = [raw(one) for one in reads], [raw(one) for one in writes]

        kept = simulation.memory.owned_by(timeline, [*reads, *writes])

        def job(kept: list[torch.UntypedStorage] = kept) -> None:  # noqa: ARG001 - until it ran
            if self._is_refused or self._is_aborted:
                return
            with _disable_current_modes(), torch.no_grad():
                move(sources, targets)

        if isinstance(timeline, Stream) and timeline.is_late:
            timeline.queue(job)
        else:
            job()
        return _Done()

    def _gather(self, own: Tensor, output: Tensor) -> None:
        parts = self._parts("all_gather", own.view(torch.uint8))
        slots = output.view(torch.uint8).view(self.size(), -1)
        for slot, part in zip(slots, parts, strict=False):
            slot.copy_(part.view(-1))

    def _scatter(self, operator: "_Operator", whole: Tensor, output: Tensor) -> None:
        parts = self._parts(f"reduce_scatter {operator.name}", whole)
        own = [part.view(self.size(), -1)[self._own] for part in parts]
        operator.combine(own, output)

    def _swap(self, own: Tensor, output: Tensor) -> None:
        parts = self._parts("all_to_all", own.view(torch.uint8))
        rows = output.view(torch.uint8).view(self.size(), -1)
        for row, part in zip(rows, parts, strict=False):
            row.copy_(part.view(self.size(), -1)[self._own])

    def _swap_uneven(self, owns: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self._exchange is None:  # the sizes of the other ranks are not known
            for output in outputs:
                output.zero_()
            return
        sizes = torch.tensor([own.nbytes for own in owns])
        known = self._parts("sizes of an all_to_all", sizes)
        if not known:  # the group was aborted
            return
        width = max(1, *(max(part.tolist()) for part in known))  # perhaps nothing is sent
        rows = torch.zeros(self.size(), width, dtype=torch.uint8)
        for row, own in zip(rows, owns, strict=True):
            row[: own.nbytes] = own.reshape(-1).view(torch.uint8)
        for output, part in zip(outputs, self._parts("all_to_all", rows), strict=False):
            output.view(torch.uint8).copy_(part[self._own][: output.nbytes])

    def _reduce(self, operator: "_Operator", tensor: Tensor, output: Tensor) -> None:
        operator.combine(self._parts(f"all_reduce {operator.name}", tensor), output)

    def _parts(self, operation: str, own: Tensor) -> Sequence[Tensor]:
        """The ``own`` of each rank; nothing if the group was aborted."""
        if self._exchange is None:
            return [own.clone() for _ in range(self.size())]
        return self._exchange.gather(operation, own) or ()


def _each(move: Callable[[Tensor, Tensor], None]) -> _Move:
    def move_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target.numel():
                move(source, target)

    return move_all


@dataclass(frozen=True)
class _Operator:
    """A ReduceOp, applied as NCCL does."""

    name: str
    factor: float | None = None  # multiplies each addend before the sum

    @classmethod
    def read(cls, options: Any) -> "_Operator":
        """Return the operator in the options of a collective."""
        kind, factor = (
            (dist.ReduceOp.SUM, None) if options is None else options.reduceOp.__getstate__()
        )
        name = kind.name.lower()
        assert name in {"sum", "max", "avg", "premul_sum"}
        return cls(name, factor)

    def combine(self, parts: Sequence[Tensor], output: Tensor) -> None:
        if not parts:
            return
        factor = 1 / len(parts) if self.name == "avg" else self.factor
        addends = [part if factor is None else part * factor for part in parts]
        total = addends[0].clone()
        for addend in addends[1:]:
            total = torch.maximum(total, addend) if self.name == "max" else total.add_(addend)
        output.copy_(total.view(output.shape))


class _Done:
    """The work of a collective that is queued on the caller's stream."""

    def wait(self, *_args: Any) -> bool:
        return True
