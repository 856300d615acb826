"""`transaction`: a training step that happens on every rank, or on none."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PeerAborted, PlanError, StepError
from shardwise.features.snapshot import ModelSnapshot, OptimizerSnapshot
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.scheduler import Scheduler
from shardwise.transport.communicator import Communicator, communicator
from shardwise.transport.device import wait_for_device

__all__ = ["transaction"]


@contextlib.contextmanager
def transaction(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Within it, a training step happens on every rank or on none; all ranks have to enter.

    ::

        with sw.transaction(model, optimizer):
            loss = model(next(batches)).mean()
            loss.backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    An exception in the block, on any rank, leaves it as it is on that rank and becomes a
    `PeerAborted` with its words on the others, at whatever of the model they wait for next or at
    the end of the block, where all ranks vote. Then every rank undoes the step: parameters, states
    and groups (``lr`` included) of ``optimizers``, gradients, the model's buffers, and torch's
    random states, of the CPU and of the model's GPU, are what they were at the beginning. So the
    next step, a second attempt or another batch, gives the bits that it would have given.

    What else the block changes stays changed: the iterator over the batches, a learning rate
    scheduler, a GradScaler, a moving average, other generators of random numbers. An exception that
    has reached other ranks has to leave the block; if it is caught within, the vote fails.

    Memory: from an optimizer's first step to the end of the block, a second copy of this rank's
    runs of its parameters and states (for AdamW in float32, 12 bytes for each element of a shard);
    for the whole block, a copy of the buffers and of gradients that were not None before it.
    Time: these copies, and an exchange of a byte between all ranks; to measure both,
    ``shardwise bench --vs ddp --ours fsdp,fsdp-transaction``.

    Between GPUs (NCCL) the others learn of it within seconds, by a thread that looks at what their
    devices wait for.

    Args:
        model: a model that `fully_shard` has sharded.
        optimizers: all that step in the block.

    Raises:
        PlanError: the model is not sharded, or is a unit inside one that is.
        PeerAborted: another rank raised.
        PeerLost: another rank is gone; this one has undone the step all the same.
        StepError: the block is inside another transaction of the model, a forward, a backward or
            `gathered`; or something other than ``optimizers`` changed a parameter.
    """
    others = [type(one).__name__ for one in optimizers if not isinstance(one, Optimizer)]
    if others:
        raise PlanError(
            f"transaction takes torch.optim.Optimizers after the model, got {others[0]}"
        )
    runtime = runtime_of_root(model)
    _begin(runtime.scheduler)
    step = _Step(runtime)
    try:
        step.begin(model, optimizers)
        yield
        step.end()
    except BaseException as error:
        if not step.is_decided:
            step.undo(error)
        raise
    finally:
        step.forget()
        runtime.scheduler.is_in_transaction = False


def _begin(scheduler: Scheduler) -> None:
    if scheduler.is_in_transaction:
        raise StepError(
            "a transaction of this model is open already; one transaction is one step, so put "
            "the whole step into a single `with sw.transaction(...)`"
        )
    scheduler.check_idle("a transaction cannot begin in a forward, a backward or sw.gathered")
    scheduler.recover()
    scheduler.report("a transaction")
    scheduler.is_in_transaction = True


class _Step:
    """What a transaction keeps while it is open."""

    def __init__(self, runtime: Runtime) -> None:
        self._scheduler = runtime.scheduler
        self._device = runtime.pools.device
        self._links: Communicator = communicator(runtime.mesh.world, self._device)
        self._epoch = self._links.epoch
        self._model: ModelSnapshot | None = None
        self._optimizers: list[OptimizerSnapshot] = []
        self._cleanup = contextlib.ExitStack()
        self._has_voted = False
        self.is_decided = False  # all ranks have voted for the step

    def begin(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        self._model = ModelSnapshot(model, self._device)
        for optimizer in optimizers:
            snapshot = OptimizerSnapshot(optimizer)
            self._optimizers.append(snapshot)
            handle = optimizer.register_step_pre_hook(snapshot.complete_before_step)
            self._cleanup.callback(handle.remove)

    def end(self) -> None:
        """Return when every rank has come to the end of its step."""
        self._check_parameters()
        was_caught = self._links.is_broken or self._links.epoch != self._epoch
        self._links.raise_found()  # on a device, where nothing has waited for it
        if was_caught:
            raise StepError(
                "an exception that other ranks know of was caught inside the transaction, so they "
                "have undone their step; catch it outside of `with sw.transaction(...)`"
            )
        self._vote(failed=False)

    def undo(self, error: BaseException) -> None:
        """Tell the others, and put back what was there before."""
        self._scheduler.abandon(error)
        wait_for_device(self._device)  # copies from and to shards that are on the host
        if self._model is not None:
            self._model.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        # Without a monitor no rank reads the status of one that raised, but a rank that has
        # begun an optimizer's step has issued every other collective of this step.
        has_stepped = any(optimizer.is_complete for optimizer in self._optimizers)
        has_stepped = has_stepped and not self._scheduler.steps_in_backward
        if has_stepped and not self._links.is_monitored and not self._has_voted:
            with contextlib.suppress(StepError):
                self._vote(failed=True)

    def forget(self) -> None:
        self._cleanup.close()
        self._model = None
        self._optimizers = []

    def _check_parameters(self) -> None:
        """Refuse changes that could not be undone."""
        assert self._model is not None
        kept = {id(p) for optimizer in self._optimizers for p in optimizer.parameters}
        changed = self._model.changed_parameters().items()
        strays = [name for name, parameter in changed if id(parameter) not in kept]
        if strays:
            raise StepError(
                f"{', '.join(strays)}: changed in a transaction that could not undo it; pass every "
                "optimizer that steps in it, as in sw.transaction(model, optimizer), and change "
                "parameters by hand outside of it"
            )

    def _vote(self, *, failed: bool) -> None:
        """Exchange with all ranks whether the step is to be undone.

        Raises:
            PeerAborted: some rank says so.
        """
        links = self._links
        self._has_voted = True
        if links.num_ranks == 1:
            return
        votes = torch.zeros(links.num_ranks, dtype=torch.uint8, device=self._device)
        votes[links.rank] = failed
        links.where = "end of the transaction"
        pending = links.reduce.all_gather(votes, links.world, "vote on the step")
        try:
            links.wait(pending)
        except StepError:
            raise
        except BaseException:  # an interrupt: what this rank has voted holds, so the others decide
            with contextlib.suppress(StepError):
                links.wait(pending)
                self.is_decided = not votes.any()
            raise
        against = votes.nonzero().flatten().tolist()
        links.raise_found()  # on a device the host has waited only now
        if against:
            raise PeerAborted(f"rank {against[0]} gave up in this step; its own output says why")
        self.is_decided = True
