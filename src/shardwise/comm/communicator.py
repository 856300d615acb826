"""The collectives among the ranks of a mesh: two queues, and what watches them."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count

import torch
import torch.distributed as dist

from shardwise.comm.api import RankGroup, SharedMemory, Work
from shardwise.comm.device import ThreadStream, is_accelerator, make_current
from shardwise.comm.groups import backend_of, becomes_true
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.queue import Collectives
from shardwise.errors import PlanError, ShardwiseError

__all__ = [
    "POLL_SECONDS",
    "Collectives",
    "Communicator",
    "Place",
    "WaitUntil",
    "Watch",
    "communicator",
    "make_collectives",
    "new_shared_memory",
    "note_place",
    "parts",
]

POLL_SECONDS = 1.0  # between two looks during a wait

# One per process group, device and number of queues, shared by all models. Keyed by the group
# object, so ranks that are threads of one process have separate ones.
_ByDevice = dict[tuple[torch.device, bool], "Communicator"]
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, _ByDevice]" = (
    weakref.WeakKeyDictionary()
)
_queues: "weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]]" = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Place:
    """Where this rank is in its program."""

    step: int = 0
    where: str = "before the first step"


class Watch:
    """Notices ranks that hang, die or diverge, and ends the step on all ranks with one error.

    This one notices nothing: a rank waits for others until the backend gives up.
    `shardwise.watch` has the real one.
    """

    is_active = False  # whether a waiting rank learns of errors on other ranks
    is_broken = False  # an error has ended a step since the last recovery
    epoch = 0  # number of recoveries

    @property
    def is_locked_here(self) -> bool:
        """Whether this thread holds the lock that `abort` waits for, so that it would hang."""
        return False

    def enter(self, unit: str) -> None:
        """Note that the forward of ``unit`` begins."""

    def wait(self, work: Work) -> None:
        """Return when ``work`` has ended, with or without an error.

        Raises:
            RanksDiverged: the ranks wait for different things.
            PeerAborted: another rank raised.
            PeerLost: another rank died, or its process is silent.
        """
        work.wait()

    def failed(self, error: BaseException) -> None:
        """Raise the error that ended the step on all ranks, if a work failed because of it."""

    def check_peers(self) -> None:
        """Raise PeerLost if another process is silent or has ended. Call it during a long wait."""

    def raise_found(self) -> None:
        """Raise the error that was found meanwhile. Call it after the host has waited."""

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this rank raised, so that they do not wait for it."""

    def recover(self) -> None:
        """Resynchronize the ranks after an error. Costs nothing if there was none.

        Raises:
            PeerLost: another rank died; or it is silent, and the next call tries again.
            StepError: what `Communicator.wait` would have raised for the last step of a device.
        """


# Returns when what it is called with is true; see `Communicator.wait_until`.
WaitUntil = Callable[[Callable[[], bool]], None]
# (all ranks, device, queues to watch, place of this rank); it must not keep the process group alive
NewWatch = Callable[[RankGroup, torch.device, Sequence[Collectives], Place], Watch]


@dataclass(slots=True)
class Parts:
    """What `shardwise.parts` adds to this package, if the package that has it is there."""

    # Makes a queue between CPUs, in the place of Gloo: (all ranks, name, how to wait for them).
    host_queues: Callable[[RankGroup, str, WaitUntil | None], Collectives] | None = None
    # Makes the memory for the gathered parameters of a model, if ranks can share it.
    shared_memory: Callable[[], SharedMemory] | None = None
    new_watch: NewWatch | None = None  # watches new communicators


parts = Parts()


def communicator(world: RankGroup, device: torch.device) -> "Communicator":
    """Return the communicator of all ranks of a mesh. All ranks make the first call together."""
    if world.parent is None:
        return Communicator(world, device)
    # No lock: a group belongs to one rank, and a new communicator waits for the other ranks.
    of_group, key = _communicators.setdefault(world.parent, {}), (device, world.has_one_queue)
    if key not in of_group:
        of_group[key] = Communicator(world, device)
    return of_group[key]


def make_collectives(
    world: RankGroup,
    device: torch.device,
    name: str,
    number: int | None = None,
    wait: WaitUntil | None = None,
) -> Collectives:
    """Create a queue of collectives among the ranks of ``world``. All of them call this.

    No other queue has the same ``name`` and ``number``, which is by default that of the queues that
    these ranks have created before. Between CPUs, ``wait`` waits for the other ranks.
    """
    backend = backend_of(world.parent, device.type)
    is_on_host = device.type == "cpu" and backend in (None, "gloo", "hostccl")
    if is_on_host and backend is None:
        backend = "gloo"  # the group is for accelerators only
    if number is None:
        number = 0 if world.parent is None else next(_queues.setdefault(world.parent, count()))
    name = f"shardwise/{device.type}/{name}/{number}"
    if world.size > 1 and device.type != "cpu" and backend in ("gloo", None):
        raise PlanError(
            f"the model is on {device}, for which the process group has no backend but Gloo, and "
            'that moves host memory; pass backend="cpu:gloo,cuda:nccl" to init_process_group, or '
            "move the model to the CPU"
        )
    if world.size > 1 and is_on_host and parts.host_queues is not None:
        return parts.host_queues(world, name, wait)
    return ProcessGroupCollectives(world, device, backend, name)


def new_shared_memory(device: torch.device) -> SharedMemory | None:
    """Return memory on ``device`` in which ranks may gather together, if there is any."""
    if is_accelerator(device) or parts.shared_memory is None:
        return None
    return parts.shared_memory()


class _Condition(Work):
    """A condition to wait for, which reads the store."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def wait(self, timeout_seconds: float = -1) -> bool:
        return becomes_true(self._condition, math.inf if timeout_seconds < 0 else timeout_seconds)


class Communicator:
    """Two queues of collectives: gathers do not wait behind reductions, nor the reverse.

    With `RankGroup.has_one_queue`, all collectives are in one, in the order of their launch, which
    is the same on all ranks: half as many process groups.
    """

    is_joined = False  # a model of these ranks is inside `sw.join`
    refusal = ""  # why ranks cannot exchange values between steps now

    def __init__(self, world: RankGroup, device: torch.device) -> None:
        self._device = device
        self.num_ranks = world.size
        self.rank = world.own_rank
        names = ("gather",) if world.has_one_queue else ("gather", "reduce")
        queues = [make_collectives(world, device, name) for name in names]
        self.gather, self.reduce = queues[0], queues[-1]
        self.place = Place()
        self.watch = Watch()
        watched = [queue for queue in queues if queue.is_monitored]
        if parts.new_watch is None:
            for queue in watched:  # nothing reads its state, which would grow with each collective
                queue.is_monitored = False
        elif watched:
            self.watch = parts.new_watch(world, device, watched, self.place)

    @cached_property
    def cleanup(self) -> ThreadStream:
        """Runs what destructors leave to do: they may run on a thread that holds any lock."""
        stream = ThreadStream("shardwise-cleanup")
        stream.submit(partial(make_current, self._device))
        return stream

    @property
    def world(self) -> RankGroup:
        """All ranks."""
        return self.gather.world

    def wait(self, work: Work) -> None:
        """Return when compute may use the result: on a device, immediately.

        Raises:
            StepError: what `Watch.wait` raises.
            Exception: the work's own error, on this rank.
        """
        self.watch.wait(work)
        if work.error is not None:
            self.watch.failed(work.error)
            awaited = "an exchange" if work.collective is None else work.collective.label
            note_place(work.error, f"step {self.place.step}, {self.place.where}, {awaited}")
            self.watch.abort(work.error)
            raise work.error

    def wait_alone(self, work: Work) -> None:
        """Return when ``work`` has ended, for which the other ranks need not wait.

        Raises:
            PeerLost: another rank is silent or has ended, so ``work`` may never end.
            Exception: the work's own error, of which the other ranks are not told.
        """
        while not work.wait(POLL_SECONDS):
            self.watch.check_peers()
        if work.error is not None:
            raise work.error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition``, which reads the store, is true; raise as `wait` does."""
        self.wait(_Condition(condition))


def note_place(error: BaseException, place: str) -> None:
    """Add to an error of this rank where it was raised ("step 3, ..."), if no note says so."""
    notes = getattr(error, "__notes__", ())
    if not (isinstance(error, ShardwiseError) or any(" in step " in note for note in notes)):
        error.add_note(f"raised in {place}")
