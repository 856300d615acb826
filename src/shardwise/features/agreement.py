"""Exchanges of a few numbers, by which the ranks inside `sw.join` agree on what they do next."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from shardwise._private import pytree
from shardwise.comm.api import Operation, Reduction, Stage, Work
from shardwise.comm.communicator import communicator
from shardwise.comm.device import wait_for_device
from shardwise.errors import StepError
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import count_sent
from shardwise.tensor.reductions import gather_runs

__all__ = [
    "FORWARDS",
    "MAY_WAIT",
    "MODULUS",
    "NAMES",
    "SHARES",
    "Action",
    "Exchange",
    "Row",
    "are_equal",
    "pack",
    "unpack",
    "with_square",
]

# Of numbers whose squares are summed in float64: exactly, for up to 8192 ranks.
MODULUS = 1 << 20


class Action(IntEnum):
    """What a rank does next. Of several, the ranks do the first, and those with others wait."""

    ACCUMULATE = 0  # a forward whose gradients are not reduced yet
    BACKWARD = 1
    FORWARD = 2
    COUNT_TOKENS = 3
    CLIP = 4
    STEP = 5
    SUM_LOSSES = 6
    LEAVE = 7  # nothing


NAMES = {
    Action.ACCUMULATE: "runs a forward",
    Action.BACKWARD: "runs a backward",
    Action.FORWARD: "runs a forward",
    Action.COUNT_TOKENS: "counts tokens",
    Action.CLIP: "clips gradients",
    Action.STEP: "steps an optimizer",
    Action.SUM_LOSSES: "ends sw.backward",
    Action.LEAVE: "has left its loop",
}
# A rank that announces one of these waits while other ranks do what comes before it.
MAY_WAIT = {Action.FORWARD, Action.CLIP, Action.STEP, Action.SUM_LOSSES, Action.LEAVE}
SHARES = {Action.BACKWARD, Action.CLIP, Action.STEP}  # of which shadows need to know more
FORWARDS = {Action.ACCUMULATE, Action.FORWARD}


@dataclass
class Row:
    """The numbers of one rank in an exchange, or their sums over all ranks.

    Numbers that must be equal come with their squares: see `are_equal`.
    """

    num: list[float] = field(default_factory=lambda: [0.0] * len(Action))  # 1 for what it does
    values: list[float] = field(default_factory=lambda: [0.0] * len(Action))  # which one
    squares: list[float] = field(default_factory=lambda: [0.0] * len(Action))
    steps: tuple[float, float] = (0.0, 0.0)  # of optimizers
    recordings: tuple[float, float] = (0.0, 0.0)  # a digest of them
    num_computing: float = 0.0
    amount: float = 0.0
    packed: list[float] = field(default_factory=list)  # values that shadows need


class Exchange:
    """Collectives of all ranks of a model. The host waits for their results."""

    def __init__(self, runtime: Runtime) -> None:
        self._mesh = runtime.mesh
        self._device = runtime.pools.device
        self._comm = communicator(runtime.mesh.world, self._device)
        self.num_ranks, self.rank = self._comm.num_ranks, self._comm.rank
        if self._comm.is_joined:
            raise StepError(
                "another model of these ranks is in sw.join already; ranks without batches follow "
                "one model at a time"
            )

    def open(self) -> None:
        """Refuse others until `close`."""
        self._comm.is_joined = True

    def close(self) -> None:
        """Allow another one."""
        self._comm.is_joined, self._comm.refusal = False, ""

    def refuse_others(self, refusal: str) -> None:
        """Refuse all exchanges of values between steps, if there is a reason for it."""
        self._comm.refusal = refusal

    def sum(self, row: Row) -> Row:
        """The sums over all ranks of the numbers of each row."""
        own, spec = pytree.tree_flatten(vars(row))
        numbers = self._tensor(own, torch.float64)
        if self.num_ranks > 1:
            world = self._comm.world
            stages = (
                Stage(Operation.REDUCE_SCATTER, world.select(self.rank)),
                Stage(Operation.ALL_REDUCE, world),
            )
            reduction = Reduction(numbers, numbers, None, numbers, stages)
            self._wait(self._comm.reduce.reduce(reduction, "join"))
        return Row(**pytree.tree_unflatten(numbers.tolist(), spec))

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The maxima over all ranks of ``values``."""
        numbers = self._tensor(values, torch.int64)
        self._wait(self._comm.reduce.all_reduce_max(numbers, self._comm.world, "follow"))
        return list(numbers.tolist())

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """The ``values`` of each rank."""
        own = self._tensor(values, torch.float64)
        rows = gather_runs(own, len(values), self._mesh, "options", self._comm.world)
        return list(rows.tolist())

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(mode=False):  # another thread may write to it
            return torch.tensor(values, dtype=dtype, device="cpu").to(self._device)

    def _wait(self, work: Work) -> None:
        self._comm.wait(work)
        count_sent(self._mesh, work)
        wait_for_device(self._device)
        self._comm.watch.raise_found()


def with_square(number: int) -> tuple[float, float]:
    """The numbers whose sums `are_equal` takes."""
    number %= MODULUS
    return float(number), float(number**2)


def are_equal(num: float, total: float, squares: float) -> bool:
    """Whether ``num`` whole numbers with this sum, and this sum of squares, are equal."""
    return int(num) * int(squares) == int(total) ** 2


def pack(values: Sequence[float], size: int) -> list[float]:
    """Numbers whose sums over ranks with the same ``values`` give these to `unpack`, exactly.

    There are at most ``size`` values, or none on ranks that only take part; all pass one ``size``.

    Raises:
        StepError: there are more.
    """
    if len(values) > size:
        raise StepError("inside sw.join, an optimizer has got more parameter groups or options")
    if not values:
        return [0.0] * (3 + 2 * size)
    data = struct.pack(f"<{len(values)}d", *values).ljust(8 * size, b"\0")
    return [1.0, *with_square(zlib.crc32(data)), *map(float, struct.unpack(f"<{2 * size}I", data))]


def unpack(sums: Sequence[float], num: int) -> list[float] | None:
    """The ``values`` of ``num`` ranks; None if they differ, or other ranks had some as well."""
    num_packed, checksum, squares, *halves = sums
    if num_packed != num or not are_equal(num, checksum, squares):
        return None
    if any(half % num for half in halves):
        return None
    data = struct.pack(f"<{len(halves)}I", *(int(half) // num for half in halves))
    return list(struct.unpack(f"<{len(halves) // 2}d", data))
