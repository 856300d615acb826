"""Exchanges of a few numbers, by which the ranks inside `sw.join` agree on what they do next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from shardwise.comm.api import Operation, Reduction, Stage, Work
from shardwise.comm.communicator import communicator
from shardwise.comm.device import wait_for_device
from shardwise.errors import StepError
from shardwise.plan.layout import Run
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import count_sent
from shardwise.tensor.reductions import gather_runs

__all__ = [
    "FORWARDS",
    "MAY_WAIT",
    "MODULUS",
    "NAMES",
    "Action",
    "Exchange",
    "Row",
    "are_equal",
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

    def pack(self) -> list[float]:
        pairs = (*self.steps, *self.recordings)
        return [*self.num, *self.values, *self.squares, *pairs, self.num_computing, self.amount]

    @staticmethod
    def unpack(numbers: Sequence[float]) -> "Row":
        n = len(Action)
        num, values, squares = (list(numbers[i * n : (i + 1) * n]) for i in range(3))
        a, b, c, d, *rest = numbers[3 * n :]
        return Row(num, values, squares, (a, b), (c, d), *rest)


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
        self._comm.is_joined = True

    def close(self) -> None:
        """Allow another one."""
        self._comm.is_joined, self._comm.refusal = False, ""

    def refuse_others(self, refusal: str) -> None:
        """Refuse all exchanges of values between steps, if there is a reason for it."""
        self._comm.refusal = refusal

    def sum(self, row: Row) -> Row:
        """The sums over all ranks of the numbers of each row."""
        numbers = self._tensor(row.pack(), torch.float64)
        if self.num_ranks > 1:
            world = self._comm.world
            stages = (
                Stage(Operation.REDUCE_SCATTER, world.select(self.rank)),
                Stage(Operation.ALL_REDUCE, world),
            )
            reduction = Reduction(numbers, numbers, None, numbers, stages)
            self._wait(self._comm.reduce.reduce(reduction, "join"))
        return Row.unpack(numbers.tolist())

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The maxima over all ranks of ``values``."""
        numbers = self._tensor(values, torch.int64)
        self._wait(self._comm.reduce.all_reduce_max(numbers, self._comm.world, "follow"))
        return list(numbers.tolist())

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """The ``values`` of each rank."""
        own = self._tensor(values, torch.float64)
        runs = [Run(0, len(values))] * self.num_ranks
        rows = gather_runs(own, runs, self._mesh, "options", self._comm.world)
        return list(rows.tolist())

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(mode=False):  # another thread may write to it
            return torch.tensor(values, dtype=dtype).to(self._device)

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
