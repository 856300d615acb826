"""Notes on out-of-memory errors: what uses device memory, and what would free some of it."""

import errno
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise._warnings import warn_caller
from shardwise.comm.device import is_accelerator
from shardwise.local_devices import allocated_bytes, num_allocation_failures
from shardwise.runtime.accumulation import reduced_part_of
from shardwise.runtime.engine import Runtime
from shardwise.runtime.nested import plain_tensors
from shardwise.runtime.observer import MemoryNotes
from shardwise.tensor.sharding import local_of

__all__ = ["HeldMemory", "is_out_of_memory"]

_NUM_LARGEST = 3
_NUM_REDUCING = 2  # units that are reduced at the same time
_LARGE_SHARE = 0.5  # of the gathered bytes, in one unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: by Python or torch, on any device or in shared memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_from_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_from_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


class HeldMemory(MemoryNotes):
    """The device memory of one model on this rank, measured only after a failed allocation."""

    def __init__(self, root: nn.Module, runtime: Runtime) -> None:
        self._root = weakref.ref(root)
        self._plan, self._units, self._pools = runtime.plan, runtime.units, runtime.pools
        self._table: str | None = None  # of a failure in backward, whose exception is not known yet
        self._num_failures = num_allocation_failures(runtime.pools.device)

    def note(self, error: BaseException, where: str) -> None:
        """Add a table of the memory to ``error``, once, if it is an out-of-memory error."""
        if not is_out_of_memory(error):
            return
        notes = getattr(error, "__notes__", ())
        if not any(note.startswith("out of memory in ") for note in notes):
            error.add_note(self._table or self.table(where))
            self._num_failures = num_allocation_failures(self._pools.device)

    def remember(self, where: str) -> None:
        """Keep the table for an exception in backward, which only backward's caller will see.

        Warns if the accelerator's allocator has counted another failure.
        """
        self._table = self.table(where)
        before = self._num_failures
        self._num_failures = num_allocation_failures(self._pools.device)
        if self._num_failures > before:
            warn_caller(self._table)

    def forget(self) -> None:
        """Drop the table of the last step."""
        self._table = None

    def table(self, where: str) -> str:
        """A table of the device memory, with advice; ``where`` says what this rank was doing."""
        gathered = self._gathered()
        held = self._held(sum(num for num, _ in gathered))
        if is_accelerator(self._pools.device):
            others = allocated_bytes(self._pools.device) - sum(held.values())
            held["activations and all others"] = max(0, others)
        largest = ", ".join(f"{label} {_megabytes(num)}" for num, label in gathered[:_NUM_LARGEST])
        remark = f"{len(gathered)} of {len(self._units)}; the largest: {largest}"
        remarks = {"gathered units": remark} if gathered else {}
        lines = [f"out of memory in {where}; on {self._pools.device} are:"]
        for kind, num_bytes in held.items():
            lines.append(f"  {kind:<28}{_megabytes(num_bytes):>14}  {remarks.get(kind, '')}")
        advice = sorted(self._advice(held, gathered), reverse=True)
        if advice:
            lines.append("to free some of it:")
            lines += [f"  {text}: up to {_megabytes(num)}" for num, text in advice]
        return "\n".join(line.rstrip() for line in lines)

    def _held(self, gathered_bytes: int) -> dict[str, int]:
        """The bytes of each kind of tensors, except activations."""
        root, pools = self._root(), self._pools
        sharded = [one.sharded for unit in self._units for one in unit.parameters]
        flats = [flat for unit in self._units for flat in unit.flats]
        whole = pools.of_gradients.allocated_bytes
        whole += sum(unit.plan.gradient_bytes for unit in self._units if unit.plan.holds_gradients)
        idle = sum(pool.held_bytes - pool.allocated_bytes for pool in pools)
        return {
            "shards": self._here(one for flat in flats for one in flat.codec.stored()),
            "gathered units": gathered_bytes,
            "gradients before reduction": whole,
            "gradients": self._here(
                reduced_part_of(one) for p in sharded if (one := p.grad) is not None
            ),
            "optimizer states": self._here(_states_of(sharded)),
            "buffers": 0 if root is None else self._here(root.buffers()),
            "kept for the next units": max(0, idle),
        }

    def _gathered(self) -> list[tuple[int, str]]:
        """(bytes, label) of the units that are gathered now, the largest first."""
        sizes = (
            (sum(flat.gathered_bytes for flat in unit.flats), unit.plan.label)
            for unit in self._units
        )
        return sorted((size for size in sizes if size[0]), reverse=True)

    def _advice(
        self, held: dict[str, int], gathered: list[tuple[int, str]]
    ) -> Iterator[tuple[int, str]]:
        """(the most bytes it frees, what the user can change)."""
        stays = {unit.plan.label for unit in self._units if not unit.plan.reshard}
        kept = sum(n for n, label in gathered if label in stays)
        if len(gathered) > 1 and kept:
            yield kept, "reshard_after_forward=True frees units until their backward"
        if len(gathered) > 1 and self._plan.prefetch:
            ahead = sum(n for n, _ in gathered[: self._plan.prefetch])
            yield ahead, f"prefetch=0 instead of {self._plan.prefetch} gathers none ahead"
        if gathered and gathered[0][0] > _LARGE_SHARE * held["gathered units"]:
            yield gathered[0][0] // 2, f"smaller units: {gathered[0][1]} could be several"
        at_once = _NUM_REDUCING * max(unit.plan.gradient_bytes for unit in self._units)
        if held["gradients before reduction"] > at_once:
            waiting = held["gradients before reduction"] - at_once
            yield waiting, "set_requires_gradient_sync(True) reduces each micro-batch's gradients"
        if held["gradients"]:
            yield held["gradients"], "sw.optimizer_in_backward drops each gradient after its use"
        if is_accelerator(self._pools.device):
            moved = held["shards"] + held["gradients"] + held["optimizer states"]
            yield moved, "offload_policy=sw.CPUOffloadPolicy() keeps shards and their states there"
        others = held.get("activations and all others")
        if others:
            yield others, "activation checkpointing, sw.offload_activations or a smaller batch"

    def _here(self, tensors: Iterable[Tensor | None]) -> int:
        """Bytes of this rank's parts of ``tensors`` on the device; shared memory counts once."""
        own = (local_of(one) for one in tensors if one is not None)
        plain = chain.from_iterable(map(plain_tensors, own))
        here = [one for one in plain if one.device == self._pools.device]
        return sum({one.data_ptr(): one.nbytes for one in here}.values())


def _states_of(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors in the states of ``parameters``, in all optimizers that the process has."""
    wanted = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer):
            for parameter, state in found.state.items():
                if id(parameter) in wanted:
                    yield from (one for one in state.values() if isinstance(one, Tensor))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
