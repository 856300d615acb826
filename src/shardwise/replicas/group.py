"""The replicas of a step, or of a round of local steps, and collectives between them."""

import contextlib
import logging
import re
import secrets
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._private import AllgatherOptions, AllreduceOptions
from shardwise.checkpoint.local_state import LocalState, checksum_of
from shardwise.comm.communicator import communicator
from shardwise.comm.device import ThreadStream, device_of, make_current
from shardwise.errors import PackageMissing, PeerLost, PlanError, StepError
from shardwise.optim.outer_optimizer import Gather
from shardwise.recording.attendance import Attendance

__all__ = ["ReplicaGroup", "check_manager"]

logger = logging.getLogger("shardwise.replicas")

_VOTE_SECONDS = 10.0  # for the ranks of this replica, of which one has raised
_NAME = "shardwise"  # of the callbacks of a model, which a manager keeps


class Row(NamedTuple):
    """What the replicas of a step tell each other, as int64.

    Attributes:
        counts: whether the values of this replica count; 0 if it only takes part.
        history: stands for how its parameters became what they are.
        next: a random number; that of the first replica that counts is the next history.
        number: of the replica.
        kind: checksum of its program and options.
        checksum, fragment, local_steps: see `OuterOptimizer`; the first is equal in all replicas
            that count.
    """

    counts: int
    history: int
    next: int
    number: int
    kind: int
    checksum: int = 0
    fragment: int = 0
    local_steps: int = 0


def check_manager(manager: Any, caller: str) -> None:
    """Raise an error unless ``manager`` is a new `torchft.Manager` of a numbered replica."""
    PackageMissing.check("torchft", extra="ft", needed_for=caller)
    needed = ("start_quorum", "allreduce", "should_commit", "register_state_dict_fn")
    if not all(hasattr(manager, name) for name in needed):
        name = type(manager).__name__
        raise PlanError(f"{caller} expects a torchft.Manager, got {name}")
    if _NAME in manager._user_state_dicts:
        raise PlanError(f"{caller}: this torchft.Manager has been used; create a new one")
    if _number_of(manager) is None:
        raise PlanError(
            f"{caller}: the torchft.Manager has replica_id={manager._replica_id!r}; expected an id "
            'that ends with the number of the replica, as replica_id="replica0"'
        )


class ReplicaGroup:
    """The ranks with this rank's number in all replicas that a torchft `Manager` finds.

    They exchange a table with a `Row` per replica: in the first step of a quorum, and again in each
    step until all of them count in one that is committed. If any of them has come, left or not
    committed, the manager has another quorum. The history of all of them becomes the random number
    of the first one, so replicas whose parameters may differ have different histories: those that
    were cut off from each other and trained on, or began with different values.

    An error of a collective, or of the manager before it, fails the step. The connections are then
    closed, so that the other replicas do not wait for this one.

    Attributes:
        attendance: which replicas were there, and what it cost that others were not.
        num_replicas: the number of replicas in the last step.
        has_joined: whether this replica took the state of another one in this step.
        history: see `Row`; at first the checksum of the parameters.
        has_voted: whether the other ranks of this replica have this one's vote in this step.
    """

    def __init__(
        self, manager: Any, state: LocalState, description: str, *, is_continuous: bool = False
    ) -> None:
        """Give replicas with an equal ``description`` the ``state`` of this one.

        ``is_continuous``: see `Attendance`.
        """
        self.manager = manager
        self.history = 0  # until the first step, which takes the parameters that it finds
        self.attendance = Attendance(is_continuous=is_continuous)
        self.has_joined = self.has_voted = False
        self.num_replicas = 1
        self._state = state
        self._description = description
        self._taken: dict[str, Any] | None = None  # of another replica, not loaded yet
        self._gives = False  # in this step, its state to another replica
        self._missed: BaseException | None = None  # why it could not take a state in this step
        self._number = _number_of(manager) or 0
        self._kind = zlib.crc32(description.encode())
        self._row = Row(0, 0, 0, 0, 0)  # of the table
        self._table: list[Row] | None = None  # of this step
        self._known: list[Row] | None = None  # of the step before, if it holds in this quorum
        self._quorum = -1  # of the table
        self._is_known = False  # whether `_table` holds for the next step in this quorum
        mesh, self._device = state.runtime.mesh, state.runtime.pools.device
        self._comm = communicator(mesh.world, self._device)
        self._calls = ThreadStream("shardwise-replicas")  # one at a time
        self._lost: PeerLost | None = None  # after which the manager is shut down
        # One rank of the replica logs.
        self._log_level = logging.DEBUG if mesh.world.own_rank else logging.WARNING
        manager.register_state_dict_fn(_NAME, self._take, self._give)

    @property
    def step(self) -> int:
        """The number of steps that were committed."""
        return int(self.manager.current_step())

    def begin(self) -> None:
        """Find the replicas of the next step, and take the state of another one if necessary.

        Raises:
            StepError: there is no quorum.
            PeerLost: a rank of this replica was lost in an earlier step.
        """
        if self._lost is not None:
            raise PeerLost(f"{self._lost}; restart this replica") from self._lost
        self._known = self._table if self._is_known else None
        self._table, self._is_known = None, False
        self.has_joined = self.has_voted = False
        if not self.history:
            self.history = checksum_of(self._state.parameters)
        self._gives, self._missed = False, None
        self.attendance.begin()
        with self.attendance.waiting():
            self._ask(self.manager.start_quorum)
        self._load_taken()

    def meet(self, *extra: int, counts: bool = True) -> list[Row] | None:
        """The table of this step, which is exchanged if it may differ; None if this fails.

        Args:
            extra: the last columns of this replica's row, for which the table is always exchanged.
            counts: False if the values of this replica do not count, even if it takes part.

        Raises:
            StepError: there is no quorum.
            PlanError: this replica does not run the program of most of those that count, or has
                joined with the number of another one.
        """
        if self._table is not None:
            return self._table
        with self.attendance.waiting():
            self._ask(self.manager.wait_quorum)
        # In the first step, the manager has all ranks but one "heal" from it, a different one for
        # each number of a rank. All replicas have the same values then (see `_take`).
        heals = not self.manager.is_participating() and self.step > 0
        is_spare = self.manager.participating_rank() is None
        failure = self.manager.errored()  # in torchft, it has no connections or states then
        counts = counts and not (heals or is_spare or failure)
        quorum = self.manager._quorum_id
        if self._known is not None and quorum == self._quorum and not extra:
            if counts:
                self._table = self._known
            else:  # the others use the table, in which it counts
                self._fail(StepError("this replica does not count, and the others do not know"))
            return self._table
        self._row = Row(
            int(counts), self.history, secrets.randbits(62), self._number, self._kind, *extra
        )
        own = torch.tensor(self._row, device="cpu").to(self._device, non_blocking=True)
        rows = self._all_gather(own)
        if rows is not None and failure is not None:  # others could also give or take a state
            if not self._gives:
                self._missed = failure.original_exception
            self._fail(failure.original_exception)
        elif rows is not None:
            table = [Row(*row) for row in torch.stack(rows).tolist()]
            if quorum == self._quorum or self._can_meet(table):
                self._quorum, self._table, self.num_replicas = quorum, table, len(table)
        return self._table

    def _can_meet(self, rows: list[Row]) -> bool:
        """Whether all replicas run the same program; if not, the step fails.

        Raises:
            PlanError: this replica has another one's number, or does not run the program of most
                of those that count.
        """
        has_same_number = [row.number for row in rows].count(self._number) > 1
        if has_same_number and (self.has_joined or self.step == 0 or not self._row.counts):
            error = PlanError(
                f"two replicas have the number {self._number}, which is the end of their "
                f"replica_id={self.manager._replica_id!r}; give each its own"
            )
            self._fail(error)
            raise error
        others = [row for row in rows if row.kind != self._kind]
        if not others:
            return True
        other = max(others, key=lambda row: row.counts)
        error = PlanError(
            f"replica {other.number} runs another program than this one, which is "
            f"{self._description}; start all replicas with the same program and options"
        )
        self._fail(error)
        counted = [row.kind for row in rows if row.counts]
        if counted and 2 * counted.count(self._kind) <= len(counted):
            raise error
        return False

    def counted(self) -> list[bool]:
        """Which replicas count in this step, in the order of `gather`."""
        return [bool(row.counts) for row in self._table or ()]

    def average(self, values: Tensor) -> None:
        """Replace ``values`` [n] by the mean over the replicas whose values count."""
        table = self.meet()
        if table is None:
            return
        if not self._row.counts:
            values.zero_()
        real = torch.view_as_real(values) if values.is_complex() else values
        self._all_reduce(real, dist.ReduceOp.SUM)
        real.div_(sum(row.counts for row in table))

    def maximum(self, values: Tensor) -> None:
        """Replace ``values`` [n] by the maximum over all replicas."""
        if self.meet() is not None:
            self._all_reduce(values, dist.ReduceOp.MAX)

    def gather(self, own: Tensor) -> Gather:
        """Begin to exchange ``own`` [n] with all replicas."""
        rows: list[Tensor] = []
        here = device_of(self._device)
        stream = here.current_stream()  # which writes `own` and reads the result

        def gather() -> None:
            make_current(self._device)
            with here.use(stream):
                rows.extend(self._all_gather(own.to(self._device)) or ())

        work = self._calls.submit(gather)

        def wait() -> list[Tensor]:
            work.wait()
            if work.error is not None:
                raise work.error
            return rows

        return wait

    def commit(self) -> bool:
        """Whether the step counts: the ranks of this replica vote.

        Raises:
            StepError: there is no quorum, a rank of this replica does not vote, or could not take
                the state of another replica.
            PlanError: the replicas begin with different values.
        """
        rows = self.meet() or []
        counted = [row for row in rows if row.counts]
        histories = [_history_of(row) for row in counted or rows]
        differs = len(set(histories)) > 1
        is_cut_off = differs and _history_of(self._row) != histories[0]
        begins = self.step == 0 and (differs or len({row.history for row in rows}) > 1)
        if differs or begins:
            self.manager.report_error(StepError("replicas have trained on separately"))
        self.has_voted = True
        is_committed = bool(self._ask(self.manager.should_commit))
        self._load_taken()
        if is_committed:
            self.history = [*counted, *rows][0].next
            self._is_known = len(counted) == len(rows)
            change = self.attendance.count({row.number for row in rows}, len(counted))
            if change is not None:
                self._log("%s (replicas that count: %d)", change, len(counted))
            return True
        if self._is_cut_off(is_cut_off, begins=begins):
            self._log(
                "was cut off from replicas that trained on, and takes the state of one of them"
            )
            self.continue_after(0, self.history)
        elif (attempts := self.attendance.attempts) & (attempts - 1) == 0:  # 1, 2, 4, ...
            reason = self.manager.errored()
            why = "too few replicas" if reason is None else str(reason.original_exception)
            self._log("does not count, and is repeated: %s", why)
        return False

    def _is_cut_off(self, is_cut_off: bool, *, begins: bool) -> bool:
        """Whether a rank of this replica ``is_cut_off``. What one rank finds, all ranks raise.

        ``begins``: this rank has found other values in the first step.

        Raises:
            StepError: a rank of this replica could not take the state of another one.
            PlanError: the replicas begin with different values.
        """
        step, missed, comm = self.step, self._missed, self._comm
        flags = [step, -step, missed is not None, begins, is_cut_off]
        found = torch.tensor(flags, device=self._device)
        comm.wait(comm.reduce.all_reduce_max(found, comm.world, "check of a failed step"))
        highest, lowest, has_missed, begins, is_cut_off = found.tolist()
        if has_missed:
            raise StepError(
                "this replica cannot take the state of another one "
                f"({'see its other ranks' if missed is None else missed}); see whether it resolves "
                "the host names of the others and reaches all of their ports, and restart it"
            ) from missed
        if highest + lowest:
            raise StepError(
                "the replica whose state this one was taking is gone, and only some ranks have it; "
                "restart this replica, and it takes the state of another one"
            )
        if begins:
            raise PlanError(
                "replicas begin with different parameters; use the same seed in all of them, or "
                "load the same checkpoint"
            )
        return bool(is_cut_off)

    def continue_after(self, step: int, history: int) -> None:
        """Continue after ``step``; after step 0, with the state of another replica if it can."""
        self.manager.load_state_dict({"step": step, "batches_committed": step})
        self.history = history

    def leave(self, error: BaseException) -> None:
        """Fail the step after an error of this rank, so that no replica waits for it."""
        if not isinstance(error, PeerLost):  # otherwise, the manager has no answer
            with contextlib.suppress(Exception):
                self._ask(self.manager.wait_quorum)
        if not self.manager.errored():
            self._log("failed in this replica: %r", error)
        self._fail(error)

    def vote_against(self) -> None:
        """End the step that this replica has left, if its other ranks still run."""
        with contextlib.suppress(Exception):
            self.manager.should_commit(timeout=timedelta(seconds=_VOTE_SECONDS))

    # -- states ----------------------------------------------------------------------------------

    def _give(self) -> dict[str, Any]:
        """On a thread of the manager, while units may compute."""
        self._gives = True
        return {
            "description": self._description,
            "history": self.history,
            "state": self._state.save(),
        }

    def _take(self, given: dict[str, Any]) -> None:
        if given["description"] != self._description:
            raise PlanError(
                f"this replica is {self._description}, and the one whose state it takes is "
                f"{given['description']}; start all replicas with the same program and options"
            )
        if self.step:  # otherwise they have the same values already, or `commit` raises
            self._taken = given

    def _load_taken(self) -> None:
        """Load what the manager has received, on the thread of the caller."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._log("takes the state of another replica")
            self._state.load(taken["state"])
            self.history, self.has_joined = taken["history"], True

    # -- calls -----------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the manager, and see meanwhile that the other ranks of this replica are alive.

        Raises:
            PeerLost: one of them is not, so that there will be no answer.
            StepError: the call has failed.
        """
        answers: list[Any] = []

        def ask() -> None:
            make_current(self._device)
            answers.append(call())

        work = self._calls.submit(ask)
        try:
            self._comm.wait_alone(work)
        except StepError as error:
            if isinstance(error, PeerLost):
                self._fail(error)
            raise
        except (RuntimeError, TimeoutError) as error:
            raise StepError(
                f"step {self.step}: the manager of this replica has no answer ({error}); see "
                "whether the lighthouse and all ranks of the replica run"
            ) from error
        return answers[0]

    def _all_reduce(self, values: Tensor, operator: Any) -> None:
        options = AllreduceOptions()
        options.reduceOp = operator
        self._run(lambda group: group.allreduce([values], options))

    def _all_gather(self, own: Tensor) -> list[Tensor] | None:
        """The tensors of all replicas like ``own`` [n], in their order; None if this fails."""
        rows: list[Tensor] = []

        def gather(group: Any) -> Any:
            rows.extend(torch.empty_like(own) for _ in range(group.size()))
            return group.allgather([rows], [own], AllgatherOptions())

        return rows if self._run(gather) else None

    def _run(self, collective: Callable[[Any], Any]) -> bool:
        """Run a collective of the manager's process group; whether it has succeeded."""
        if self._table is not None and self.manager.errored():
            return False
        try:
            # Not `Manager.allreduce`, which divides by a wrong number in the first step (see
            # `meet`); for other collectives the manager has no method.
            collective(self.manager._pg).wait()
        except Exception as error:  # noqa: BLE001 - backends raise RuntimeErrors, and others
            self._fail(error)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        """Fail the step, and let no other replica wait for this one."""
        if not self.manager.errored():
            self.manager.report_error(error)
        with contextlib.suppress(Exception):  # it has failed already
            self.manager._pg.abort()
        if isinstance(error, PeerLost):  # the lighthouse would believe this replica to be alive
            self._lost = error
            self.manager.shutdown(wait=False)

    def _log(self, message: str, *values: object) -> None:
        logger.log(self._log_level, f"step %d: {message}", self.step, *values)


def _number_of(manager: Any) -> int | None:
    """The number in "replica7" or "replica7:<random>", as torchft finds it, if there is one."""
    found = re.search(r"\d+$", str(manager._replica_id).split(":", maxsplit=1)[0])
    return int(found[0]) if found else None


def _history_of(row: Row) -> tuple[int, ...]:
    """What is equal in all replicas that count, unless their values differ."""
    return row.history, row.checksum
