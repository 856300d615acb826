"""`transaction`: run a training step on every rank or on none.

Copies of everything that a step changes are restored into the objects that held them. A parameter,
state or buffer remains the same tensor, so other references to it stay valid.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.comm.communicator import Communicator, communicator
from shardwise.comm.device import random_states, set_random_states, wait_for_device
from shardwise.errors import PeerAborted, PlanError, StepError
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.attach import unowned_states
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import runtime_of_root, shard_again_if_outdated
from shardwise.runtime.parameters import reclaim_locals
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.versions import versions_of
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = ["TRANSACTION", "DiscardedError", "Step", "transaction", "undoable"]

TRANSACTION = "transaction"  # a key of `Scheduler.forbids_conversion` while one is open


class DiscardedError(StepError):
    """All ranks have decided, at the end of backward, that the step does not count."""


@contextlib.contextmanager
def transaction(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Run a training step on every rank or on none. All ranks must enter the block.

    ::

        with sw.transaction(model, optimizer):
            loss = model(next(batches)).mean()
            loss.backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    If any rank raises inside the block, that rank re-raises its exception and every other rank
    raises `PeerAborted` with the same message: when the model next waits for other ranks, or at the
    end of the block, where all ranks vote. Every rank then undoes the step. It restores the
    parameters, states and groups (including ``lr``) of ``optimizers``, gradients, the model's
    buffers, and torch's random states on the CPU and on the model's GPU. The next step, whether a
    retry or another batch, gives the same bits as if the failed step had not begun.

    Other changes are not undone: the iterator over the batches, a learning rate scheduler, a
    GradScaler, a moving average, other random number generators. An exception that has reached
    other ranks must leave the block; if it is caught inside, the vote fails.

    Memory: from an optimizer's first step to the end of the block, a second copy of this rank's
    shards of its parameters and states (for AdamW in float32, 12 bytes per element of a shard);
    for the whole block, a copy of the buffers, of gradients that were not None before it, and of
    the rounding errors of ``Wire(error_feedback=True)``.
    Time: these copies, and one byte exchanged between all ranks. To measure both, run
    ``shardwise bench --vs ddp --ours fsdp,fsdp-transaction``.

    Between GPUs (NCCL), a thread watches what each device waits for, so that the other ranks learn
    of an exception within seconds.

    Args:
        model: a model sharded by `fully_shard`.
        optimizers: every optimizer that steps in the block.

    Raises:
        PlanError: the model is not sharded, or is a unit inside a sharded model; or ranks that it
            is not sharded over hold other parts of it (tensor parallelism, pipelines): they would
            keep a step that these ranks undo.
        PeerAborted: another rank raised.
        PeerLost: another rank is gone; this rank has undone the step nevertheless.
        StepError: the block is inside another transaction of the model, a forward, a backward or
            `gathered`; or something other than ``optimizers`` changed a parameter; or the step
            could not be undone.
    """
    _check_ranks(model)
    with undoable(model, *optimizers) as step:
        yield
        step.end()


def _check_ranks(model: nn.Module) -> None:
    voting = set(runtime_of_root(model).mesh.global_ranks)
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        spec = None if sharding is None else sharding.tensor_parallel
        if spec is not None and not voting.issuperset(spec.mesh.mesh.flatten().tolist()):
            raise PlanError(
                f"sw.transaction: tensor parallelism divides {name} over {spec.mesh}, and these "
                "ranks do not vote on the step together, so some could keep a step that others "
                "undo; after an exception, load a checkpoint"
            )


@contextlib.contextmanager
def undoable(model: nn.Module, *optimizers: Optimizer) -> Iterator["Step"]:
    """A `transaction` without its vote: exceptions undo the step until it ``is_decided``."""
    wrong = [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]
    if wrong:
        raise PlanError(
            "transaction: expected each argument after the model to be a torch.optim.Optimizer, "
            f"got {wrong[0]}"
        )
    _check_idle(runtime_of_root(model).scheduler)
    shard_again_if_outdated(model)
    runtime = runtime_of_root(model)
    runtime.scheduler.recover()
    reclaim_locals(runtime.scheduler.parameters)  # a conversion before the block is no change in it
    runtime.scheduler.report("a transaction")
    step = Step(runtime)
    try:
        runtime.scheduler.forbids_conversion[TRANSACTION] = (
            "inside sw.transaction, which could not undo it; do it outside of the block"
        )
        step.begin(model, optimizers)
        yield step
    except DiscardedError:
        _to_its_end(step.restore)
        raise
    except BaseException as error:
        if not step.is_decided:
            _to_its_end(partial(step.undo, error))
        raise
    finally:
        # First, so that an interrupt cannot leave it open.
        runtime.scheduler.forbids_conversion.pop(TRANSACTION, None)
        step.forget()


def _to_its_end(undo: Callable[[], None]) -> None:
    """Call ``undo``, which may be repeated, again if it is interrupted, and then raise that.

    Raises:
        StepError: it failed.
    """
    interrupt: BaseException | None = None
    is_done = False
    while not is_done:
        try:
            undo()
            is_done = True
        except Exception as error:
            raise StepError(
                "a transaction could not be undone, so this rank has some values of the failed "
                f"step; load a checkpoint ({type(error).__name__}: {error})"
            ) from error
        except BaseException as error:  # noqa: BLE001 - raised when the step is undone
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _check_idle(scheduler: Scheduler) -> None:
    if TRANSACTION in scheduler.forbids_conversion:
        raise StepError(
            "a transaction of this model is open already; put the whole step into a single "
            "`with sw.transaction(...)`"
        )
    if scheduler.call_observer is not None:
        raise StepError(
            "sw.transaction inside sw.join: ranks without batches could not undo the step; put "
            "sw.join inside the transaction"
        )
    scheduler.check_idle("a transaction cannot begin in a forward, a backward or sw.gathered")


class Step:
    """The state of an open transaction."""

    def __init__(self, runtime: Runtime) -> None:
        self._scheduler = runtime.scheduler
        self._device = runtime.pools.device
        self._comm: Communicator = communicator(runtime.mesh.world, self._device)
        self._epoch = self._comm.watch.epoch
        self._model: ModelSnapshot | None = None
        self._optimizers: list[OptimizerSnapshot] = []
        self._cleanup = contextlib.ExitStack()
        self._has_voted = False
        self.is_decided = False  # all ranks have voted for the step

    def begin(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        self._model = ModelSnapshot(model, self._scheduler, self._device)
        for optimizer in optimizers:
            snapshot = OptimizerSnapshot(optimizer)
            self._optimizers.append(snapshot)
            handle = optimizer.register_step_pre_hook(snapshot.complete_before_step)
            self._cleanup.callback(handle.remove)

    def end(self) -> None:
        """Return when every rank has reached the end of its step."""
        self._check_parameters()
        was_caught = self._comm.watch.is_broken or self._comm.watch.epoch != self._epoch
        self._comm.watch.raise_found()  # a device's errors that nothing has waited for
        if was_caught:
            raise StepError(
                "an exception that other ranks know of was caught inside the transaction, so they "
                "have undone their step; catch it outside of `with sw.transaction(...)`"
            )
        self._vote(failed=False)

    def undo(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks and restore the state from before the step."""
        self._scheduler.abandon(error)
        self.restore()
        # Without a monitor, other ranks cannot read that this rank has raised, so it must vote. It
        # can, because before an optimizer's step a rank has issued all other collectives.
        has_stepped = any(optimizer.is_complete for optimizer in self._optimizers)
        has_stepped = has_stepped and not self._scheduler.sequencer.steps_in_backward
        if has_stepped and not self._comm.watch.is_active and not self._has_voted:
            with contextlib.suppress(StepError):
                self._vote(failed=True)

    def restore(self) -> None:
        """Restore the state from before the step."""
        wait_for_device(self._device)  # for copies to and from shards in host memory
        if self._model is not None:
            self._model.restore()
        for optimizer in self._optimizers:
            optimizer.restore()

    def forget(self) -> None:
        self._cleanup.close()
        self._model, self._optimizers = None, []

    def _check_parameters(self) -> None:
        """Raise StepError if a parameter was changed and its old value was not kept."""
        assert self._model is not None
        kept = {id(p) for optimizer in self._optimizers for p in optimizer.parameters}
        changed = self._model.changed_parameters().items()
        strays = [name for name, parameter in changed if id(parameter) not in kept]
        if strays:
            raise StepError(
                f"{', '.join(strays)}: changed in a transaction that could not undo the change; "
                "pass every optimizer that steps in it, as in sw.transaction(model, optimizer), "
                "and change parameters by hand outside the transaction"
            )

    def _vote(self, *, failed: bool) -> None:
        """Decide with all ranks whether to undo the step.

        Raises:
            PeerAborted: some rank voted to undo it.
        """
        self._has_voted = True
        self.meet(failed=failed)
        self.is_decided = True

    def meet(self, *, failed: bool = False) -> None:
        """Return when all ranks have called this.

        Raises:
            PeerAborted: a rank has raised, or ``failed``.
        """
        comm = self._comm
        if comm.num_ranks == 1:
            return
        votes = torch.zeros(comm.num_ranks, dtype=torch.uint8, device=self._device)
        votes[comm.rank] = failed
        comm.place.where = "end of the transaction"
        pending = comm.reduce.all_gather(votes, comm.world, "vote on the step")
        try:
            comm.wait(pending)
        except StepError:
            raise
        except BaseException:  # an interrupt: this rank's vote stands, and the others decide
            with contextlib.suppress(StepError):
                comm.wait(pending)
                self.is_decided = not votes.any()
            raise
        against = votes.nonzero().flatten().tolist()
        comm.watch.raise_found()  # on a device, the host has waited only now
        if against:
            raise PeerAborted(f"rank {against[0]} raised in this step; its output has the error")


class ModelSnapshot:
    """Gradients, rounding errors and buffers of a model before forward; torch's random states.

    Parameters are not copied, because only an optimizer should change them; see
    `changed_parameters`.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler, device: torch.device) -> None:
        self._device = device
        self._scheduler = scheduler
        self._num_leaves_done = 0 if scheduler.leaves is None else scheduler.leaves.num_done
        self._awaiting = scheduler.sequencer.awaiting_reduction
        self._accumulation = scheduler.accumulation
        accumulated = [one.accumulated for one in scheduler.gradients]
        self._accumulated = [(one, one.snapshot()) for one in accumulated]
        self._residuals = [(one, _clone_or_none(one.residual)) for one in scheduler.gradients]
        self._versions = [(one, versions_of(one)) for one in scheduler.parameters]
        parameters = dict(model.named_parameters())
        managed = {id(one.sharded) for one in scheduler.parameters}
        others = {name: p for name, p in parameters.items() if id(p) not in managed}
        self._others = [(name, p, p._version) for name, p in others.items()]
        self._gradients = [(p, _clone_or_none(p.grad)) for p in parameters.values()]
        self._buffers = [
            (module, name, buffer, _clone_or_none(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._random_states = random_states(device)

    def changed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that have been written to since the snapshot, by name."""
        reclaim_locals(self._scheduler.parameters)
        changed = [one for one, before in self._versions if versions_of(one) != before]
        others = {name: p for name, p, before in self._others if p._version != before}
        return {one.name: one.sharded for one in changed} | others

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # None if it had no elements: it is accumulated
        for module, name, buffer, values in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)
        set_random_states(self._device, self._random_states)
        self._scheduler.sequencer.awaiting_reduction = self._awaiting
        self._scheduler.accumulation = self._accumulation
        if self._scheduler.leaves is not None:
            self._scheduler.leaves.num_done = self._num_leaves_done
        for accumulated, before in self._accumulated:
            accumulated.restore(before)
        for gradients, residual in self._residuals:
            gradients.residual = residual


class OptimizerSnapshot:
    """An optimizer's groups, copied at once, and its parameters and states, copied on demand.

    Attributes:
        parameters: copies of this rank's runs of the parameters.
        is_complete: whether parameters and states have been copied, so that the optimizer may step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            (_Entries({k: v for k, v in group.items() if k != "params"}), list(group["params"]))
            for group in optimizer.param_groups
        ]
        self._states: dict[Tensor, _Entries] = {}
        self._unowned = _Entries({})
        self.parameters: dict[Tensor, Tensor] = {}
        self.is_complete = False

    @torch.no_grad()
    def complete_before_step(self, *_args: object) -> None:
        """Copy parameters and states before the optimizer's first step changes them."""
        if self.is_complete:
            return
        unowned = unowned_states(self._optimizer)
        self._unowned = _Entries(unowned)
        states = self._optimizer.state.items()
        self._states = {p: _Entries(state) for p, state in states if p not in unowned}
        groups = self._optimizer.param_groups
        self.parameters = {p: _run(p).clone() for group in groups for p in group["params"]}
        self.is_complete = True

    @torch.no_grad()
    def restore(self) -> None:
        groups = self._optimizer.param_groups
        del groups[len(self._groups) :]
        for group, (entries, parameters) in zip(groups, self._groups, strict=True):
            entries.restore(group)
            group["params"] = parameters
        if not self.is_complete:
            return
        for parameter, values in self.parameters.items():
            _write(parameter, values)
        state: dict[Any, Any] = self._optimizer.state
        unowned = self._unowned.restored()
        for key in state.keys() - self._states.keys() - unowned.keys():
            del state[key]
        for parameter, entries in self._states.items():
            entries.restore(state[parameter])
        state.update(unowned)


class _Entries:
    """The entries of a dict: its tensors with copies of their values, and copies of the rest."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._values = {
            key: (value, _run(value).clone())
            if isinstance(value, Tensor)
            else (copy.deepcopy(value), None)
            for key, value in entries.items()
        }

    def restore(self, entries: dict[str, Any]) -> None:
        entries.clear()
        entries.update(self.restored())

    def restored(self) -> dict[str, Any]:
        """The entries, after their values were written back."""
        for value, values in self._values.values():
            if values is not None:
                _write(value, values)
        return {key: value for key, (value, _) in self._values.items()}


def _run(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``."""
    return local_of(tensor).detach()


def _write(tensor: Tensor, values: Tensor) -> None:
    _run(tensor).copy_(values)
    if isinstance(tensor, DTensor):
        torch.autograd.graph.increment_version(tensor)


def _clone_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or is_unreduced(tensor) else tensor.detach().clone()
