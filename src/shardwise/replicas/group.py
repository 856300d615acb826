"""The replicas of a torchft `Manager` in the current step, and collectives between them."""

import contextlib
import logging
import re
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._private import AllgatherOptions, AllreduceOptions
from shardwise.errors import PackageMissing, PlanError, StepError
from shardwise.replicas.attendance import Attendance

__all__ = ["ReplicaGroup", "check_manager"]

logger = logging.getLogger("shardwise.replicas")

_VOTE_SECONDS = 10.0  # for the ranks of this replica, of which one has raised
_COUNTS, _HISTORY, _NEXT, _NUMBER = range(4)  # the columns of the table of `ReplicaGroup`


def check_manager(manager: Any, caller: str) -> None:
    """Raise an error unless ``manager`` is a `torchft.Manager`."""
    PackageMissing.check("torchft", extra="ft", needed_for=caller)
    needed = ("start_quorum", "allreduce", "should_commit", "register_state_dict_fn")
    if not all(hasattr(manager, name) for name in needed):
        name = type(manager).__name__
        raise PlanError(f"{caller} expects a torchft.Manager, got {name}")


class ReplicaGroup:
    """The ranks with this rank's number in all replicas of a step.

    In each step they exchange a table with a row per replica: whether its values count, a number
    that stands for the history of its parameters, a random number, and the number of the replica
    (at the end of its ``replica_id``). If the step is committed, the history of all of them becomes
    the random number of the first one. So replicas whose parameters may differ have different
    histories: those that were cut off from each other and trained on, or began with different
    values.

    An error of a collective is reported to the manager, and fails the step. The connections are
    then closed, so that the other replicas do not wait for this one.

    Attributes:
        attendance: which replicas were there, and what it cost that others were not.
    """

    def __init__(
        self, manager: Any, history: int, *, logs: bool, is_continuous: bool = False
    ) -> None:
        self.manager = manager
        self.history = history
        self.attendance = Attendance(is_continuous=is_continuous)
        self._number = _number_of(str(manager._replica_id))
        self._table: Tensor | None = None  # [replicas, 4 or more]
        self._own_history: tuple[int, ...] = ()
        self.takes_part = self._counts = True
        self._log_level = logging.WARNING if logs else logging.DEBUG  # one rank of the replica logs

    def begin(self) -> None:
        """Find the replicas of the next step.

        Raises:
            StepError: there is no quorum.
        """
        self._table, self.takes_part = None, True
        self.attendance.begin()
        with self.attendance.waiting(), self._explained():
            self.manager.start_quorum()

    def meet(self, device: torch.device, extra: tuple[int, ...] = ()) -> Tensor | None:
        """Exchange the table [replicas, 4 or more], once in a step; None if this fails.

        Args:
            device: of the table.
            extra: more columns; the first one has to be equal in all replicas that count.

        Raises:
            StepError: there is no quorum.
        """
        if self._table is not None:
            return self._table
        with self.attendance.waiting(), self._explained():
            self.manager.wait_quorum()
        # In the first step, the manager has all ranks but one "heal" from it, a different one for
        # each number of a rank. All replicas have the same values then (see `share`).
        heals = not self.manager.is_participating() and self.step > 0
        is_spare = self.manager.participating_rank() is None
        self._counts = self.takes_part and not (heals or is_spare)
        row = [int(self._counts), self.history, secrets.randbits(62), self._number, *extra]
        self._own_history = _history_of(row)
        rows = self.all_gather(torch.tensor(row, device=device))
        if rows is not None:
            self._table = torch.stack(rows)
        return self._table

    def counted(self) -> list[bool]:
        """Which replicas count in this step, in the order of `all_gather`."""
        return [] if self._table is None else self._table[:, _COUNTS].bool().tolist()

    def average(self, values: Tensor) -> None:
        """Replace ``values`` [n] by the mean over the replicas whose values count."""
        table = self.meet(values.device)
        if table is None:
            return
        if not self._counts:
            values.zero_()
        self.all_reduce(values, dist.ReduceOp.SUM)
        real = torch.view_as_real(values) if values.is_complex() else values
        real.div_(table[:, _COUNTS].sum())

    def all_reduce(self, values: Tensor, operator: Any) -> None:
        """Reduce ``values`` [n] over all replicas."""
        options = AllreduceOptions()
        options.reduceOp = operator
        real = torch.view_as_real(values) if values.is_complex() else values
        self._run(lambda group: group.allreduce([real], options))

    def all_gather(self, own: Tensor) -> list[Tensor] | None:
        """The tensors of all replicas like ``own`` [n], in their order; None if this fails."""
        rows: list[Tensor] = []

        def gather(group: Any) -> Any:
            rows.extend(torch.empty_like(own) for _ in range(group.size()))
            return group.allgather([rows], [own], AllgatherOptions())

        return rows if self._run(gather) else None

    def _run(self, collective: Callable[[Any], Any]) -> bool:
        """Run a collective of the manager's process group; whether it has succeeded."""
        if self.manager.errored():
            return False
        try:
            # Not `Manager.allreduce`, which divides by a wrong number in the first step
            # (`ReplicaGroup.meet`); for other collectives the manager has no method.
            collective(self.manager._pg).wait()
        except Exception as error:  # noqa: BLE001 - backends raise RuntimeErrors, and others
            self.manager.report_error(error)
            self._close_if_failed()
            return False
        return True

    def commit(self, device: torch.device) -> bool:
        """Whether the step counts: the ranks of this replica vote.

        Raises:
            StepError: there is no quorum, or a rank of this replica does not vote.
            PlanError: the replicas begin with different values.
        """
        table = self.meet(device)
        rows = [] if table is None else table.tolist()
        counted = [row for row in rows if row[_COUNTS]]
        histories = [_history_of(row) for row in counted]
        differs = len(set(histories)) > 1
        if self.step == 0 and (differs or len({row[_HISTORY] for row in rows}) > 1):
            raise PlanError(
                "replicas begin with different parameters; use the same seed in all of them, or "
                "load the same checkpoint"
            )
        if differs:
            self.manager.report_error(StepError("replicas have trained on separately"))
        with self._explained():
            is_committed = bool(self.manager.should_commit())
        if is_committed:
            self.history = [*counted, *rows][0][_NEXT]
            change = self.attendance.count({row[_NUMBER] for row in rows}, len(counted))
            if change is not None:
                self._log("%s (replicas that count: %d)", change, len(counted))
        elif differs and self._own_history != histories[0]:
            self._leave_history()
        else:
            reason = self.manager.errored()
            why = "too few replicas" if reason is None else str(reason.original_exception)
            self._log("does not count, and is repeated: %s", why)
        return is_committed

    @property
    def step(self) -> int:
        """The number of steps that were committed."""
        return int(self.manager.current_step())

    def leave(self, error: BaseException) -> None:
        """Fail the step after an error of this rank, so that no replica waits for it."""
        with contextlib.suppress(Exception):
            self.manager.wait_quorum()
        if not self.manager.errored():
            self._log("failed in this replica: %r", error)
            self.manager.report_error(error)
        self._close_if_failed()

    def vote_against(self) -> None:
        """End the step that this replica has left, if its other ranks still run."""
        with contextlib.suppress(Exception):
            self.manager.should_commit(timeout=timedelta(seconds=_VOTE_SECONDS))

    def share(
        self,
        description: str,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Let replicas that join take what ``save`` returns on this rank, and ``load`` it.

        Args:
            description: has to be equal in all replicas.
            save: is called on a thread of the manager, while units may compute.
            load: is called on the main thread, in `begin` or `commit`.
        """

        def saved() -> dict[str, Any]:
            return {"description": description, "history": self.history, "state": save()}

        def take(saved: dict[str, Any]) -> None:
            if saved["description"] != description:
                raise PlanError(
                    f"this replica is {description}, and the one whose state it takes is "
                    f"{saved['description']}; start all replicas with the same program and options"
                )
            if self.step == 0:  # the replicas have the same values already, or `commit` raises
                return
            self._log("takes the state of another replica")
            self.history = saved["history"]
            load(saved["state"])

        self.manager.register_state_dict_fn("shardwise", take, saved)

    def _log(self, message: str, *values: object) -> None:
        logger.log(self._log_level, f"step %d: {message}", self.step, *values)

    def _close_if_failed(self) -> None:
        if self.manager.errored():
            with contextlib.suppress(Exception):  # it has failed already
                self.manager._pg.abort()

    def _leave_history(self) -> None:
        """Make this replica heal from one with the history that goes on."""
        self._log("was cut off from replicas that trained on, and takes the state of one of them")
        self.manager.load_state_dict({"step": 0, "batches_committed": 0})

    @contextlib.contextmanager
    def _explained(self) -> Any:
        """Raise what a call of the manager raises as a StepError."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, StepError):
                raise
            raise StepError(
                f"step {self.step}: the manager of this replica has no answer ({error}); see "
                "whether the lighthouse and all ranks of the replica run"
            ) from error


def _number_of(replica_id: str) -> int:
    """The number in "replica7:<random>", as torchft finds it; 0 if there is none."""
    found = re.search(r"\d+$", replica_id.split(":", maxsplit=1)[0])
    return int(found[0]) if found else 0


def _history_of(row: list[int]) -> tuple[int, ...]:
    """What is equal in all replicas that count, unless their values differ."""
    return (row[_HISTORY], *row[_NUMBER + 1 : _NUMBER + 2])
