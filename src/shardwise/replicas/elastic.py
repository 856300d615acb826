"""`elastic`: gradients averaged over replicas that come and go (HSDP with a changing outer axis).

::

    replica 0   backward: reduce-scatter -+ average ---- vote -- optimizer.step()
    replica 1   backward: reduce-scatter -+ average ---- vote -- optimizer.step()
    replica 2                        takes the state of replica 0 --^  (it has come in this step)
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardwise.checkpoint.local_state import LocalState
from shardwise.comm.api import Work
from shardwise.comm.device import CommStream, DeviceStream, ThreadStream, is_accelerator
from shardwise.errors import PeerLost, PlanError, StepError
from shardwise.features.checks import check_complete
from shardwise.features.transaction import DiscardedError, Step, undoable
from shardwise.replicas.group import ReplicaGroup, check_manager
from shardwise.runtime.attach import settings_of
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import mean_over_replicas, runtime_of_root, units_in
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharding import sharding_of

__all__ = ["Elastic", "check_replica", "elastic"]


def elastic(model: nn.Module, optimizer: Optimizer, manager: Any) -> "Elastic":
    """Average the gradients of ``model`` over the replicas of ``manager``, which may come and go.

    Each replica is a world of its own, with the same number of ranks in all of them::

        model = sw.fully_shard(model, units=Block)  # over the ranks of this replica
        optimizer = torch.optim.AdamW(model.parameters())
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(), min_replica_size=1, replica_id="replica0",  # or 1, ...
            load_state_dict=None, state_dict=None,
        )
        replicas = sw.elastic(model, optimizer, manager)
        replicas.register("scheduler", scheduler)
        while manager.current_step() < 10_000:
            with replicas.step():
                model(next(batches)).mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    Args:
        model: sharded over the ranks of this replica, with any strategy.
        optimizer: the optimizer of all trainable parameters of ``model``.
        manager: a `torchft.Manager` of this rank. It needs no callbacks, and a ``replica_id`` that
            ends with the number of the replica.

    Raises:
        PackageMissing: torchft is not installed.
        PlanError: the model, the optimizer or the manager cannot be used.
    """
    check_manager(manager, "sw.elastic")
    check_replica(model, optimizer, "sw.elastic")
    check_complete(
        optimizer,
        model,
        "a replica that joins would not get its state; pass one optimizer of all trainable "
        "parameters, or freeze it",
    )
    return Elastic(model, optimizer, manager)


class Elastic:
    """A model whose gradients are averaged over replicas; see `elastic`.

    Attributes:
        is_committed: whether the last step counts.
        group: the replicas of the step; ``group.attendance`` tells who came and went.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, manager: Any) -> None:
        self.is_committed = False
        self.model = model
        self._state = LocalState(model, optimizer)
        self.group = ReplicaGroup(manager, self._state, self._state.description)
        self._runtime = self._state.runtime
        device = self._runtime.pools.device
        self._stream: CommStream = (
            DeviceStream(device)
            if is_accelerator(device)
            else ThreadStream("shardwise-replicas-mean")
        )
        self._step: Step | None = None
        self._reducing = threading.Lock()  # held by a reduction of `_step`
        self._is_broken = False
        self._handle = optimizer.register_step_pre_hook(self._vote)
        self._set_hooks(self._across)

    def register(self, name: str, stateful: Stateful) -> None:
        """Copy the state of ``stateful`` to replicas that join, as it is before a step.

        A step that does not count restores it.

        Raises:
            PlanError: there is another object with this name.
        """
        self._state.register(name, stateful)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a floating-point ``value`` over the replicas that count in this step.

        All replicas must call it at the same place of the block, before ``optimizer.step()``; the
        result is the same in all of them.
        """
        return mean_over_replicas(self._runtime, value)

    @property
    def num_replicas(self) -> int:
        """The number of replicas whose gradients were averaged in the last step that counts."""
        return self.group.attendance.num_replicas

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of all replicas: forward, backward and ``optimizer.step()``.

        ``optimizer.step()`` first decides whether the step counts on all ranks of this replica. It
        does not if another replica has died in it. Then the block ends at once, without an error
        and as if it had not begun: gradients, buffers, random states and registered objects are
        restored, and `is_committed` is False. Run the same step again. Loop on
        ``manager.current_step()``, which counts the steps that count.

        An exception of the block is raised on all ranks of this replica, as in `sw.transaction`,
        and the other replicas repeat the step.

        Raises:
            StepError: the block has ended without a step of the optimizer, or an earlier step of
                the optimizer has failed in the middle, so that this replica has to restart.
        """
        if self._is_broken:
            raise StepError(
                "the optimizer of this replica has failed in the middle of a step; restart the "
                "replica, and it takes the state of another one"
            )
        self.is_committed = False
        self._state.mark()
        try:
            self.group.begin()
            with undoable(self.model) as self._step, self._reported(self._step):
                yield
        except DiscardedError:
            pass
        except BaseException as error:
            if not (self.group.has_voted or isinstance(error, PeerLost)):
                self.group.vote_against()
            raise
        finally:
            with self._reducing:
                self._step = None
            if not self.is_committed:  # the state that it has taken in this step, if it has
                self._state.restore()

    def remove(self) -> None:
        """Average no longer; the manager stays as it is."""
        self._handle.remove()
        self._set_hooks(None)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Elastic":
        """Copies of the model keep the hooks; their gradients are not averaged: see `_across`."""
        return self

    @contextlib.contextmanager
    def _reported(self, step: Step) -> Iterator[None]:
        """Tell other replicas of an exception before ``step`` is undone, which awaits averages."""
        try:
            yield
            _check_stepped(step)
        except DiscardedError:
            raise
        except BaseException as error:
            self._is_broken = step.is_decided
            if step.is_decided:
                self._runtime.scheduler.abandon(error)
            else:
                self.group.leave(error)
            raise

    def _vote(self, _optimizer: object, args: Any, kwargs: Any) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):  # without `self`
            raise StepError(
                "sw.elastic decides whether a step counts before the optimizer runs, so it cannot "
                "call a closure: run backward first, and call optimizer.step() without it"
            )
        if self._step is None or self._step.is_decided:
            raise StepError(
                "sw.elastic: call optimizer.step() once in each `with replicas.step()`, and not "
                "outside of it"
            )
        if not self.group.commit():
            self._step.meet()  # raises if an exception on a rank of this replica is the reason
            raise DiscardedError("the step does not count")
        self.is_committed = self._step.is_decided = True

    # -- averages --------------------------------------------------------------------------------

    def _set_hooks(self, hook: Any) -> None:
        for unit in units_in(self.model, recurse=True):
            settings_of(unit).across_replicas = hook

    def _across(self, work: Work | None, values: Tensor, *, is_max: bool = False) -> Work:
        """Continue ``work``, which reduces ``values`` in this replica, over all replicas."""
        step = self._step
        if step is None:
            raise StepError("sw.elastic: call backward inside `with replicas.step()`")
        reduce = partial(self.group.maximum if is_max else self.group.average, values)
        made: Work = self._stream.submit(partial(self._continue, step, work, reduce))
        if work is not None:  # a rank that waits for other replicas is not stuck in its own
            made.collective, made.sent = work.collective, work.sent
        return made

    def _continue(self, step: Step, work: Work | None, reduce: Callable[[], None]) -> None:
        if work is not None:
            work.wait()  # after an exception, until the ranks of this replica synchronize again
        with self._reducing:
            if step is not self._step:
                raise StepError("the step has ended")
            if work is not None and work.error is not None:
                # Later reductions would be the other replicas' next. Whether a rank is lost, the
                # caller finds out: one that raised has closed its connections, too.
                self.group.leave(StepError(f"a reduction in this replica failed: {work.error}"))
                raise work.error
            reduce()


def _check_stepped(step: Step) -> None:
    if not step.is_decided:
        raise StepError(
            "a step of replicas has ended without optimizer.step(); call it inside `with "
            "replicas.step()` (a GradScaler that skips steps is not supported: use bfloat16)"
        )


def check_replica(model: nn.Module, optimizer: object, caller: str) -> Runtime:
    """Raise a PlanError if ``model`` and ``optimizer`` cannot be those of a replica."""
    runtime = runtime_of_root(model)
    if not isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise PlanError(f"{caller} expects a torch.optim.Optimizer, got {name}")
    runtime.scheduler.check_idle(f"{caller} cannot be called in the middle of a step")
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if parameter.requires_grad and (sharding is None or sharding.tensor_parallel):
            raise PlanError(
                f"{name} is trainable but not sharded by fully_shard alone, so it would differ "
                "between replicas; freeze it, or remove it from ignored_params"
            )
        if getattr(parameter, STEPS_IN_BACKWARD, False):
            raise PlanError(
                f"{caller} decides whether a step counts before the optimizer runs, and "
                "sw.optimizer_in_backward runs it in backward; call remove() on its handle"
            )
    if runtime.mesh.leaves is not None:
        raise PlanError(
            f"{caller}: the model is reproducible, but which replicas take part in a step is not; "
            "leave out reproducible=... of fully_shard"
        )
    settings = [unit.settings for unit in runtime.units]
    if any(one.collective_hook is not None for one in settings):
        raise PlanError(f"{caller}: communication hooks reduce gradients in their own way")
    if any(one.across_replicas is not None for one in settings):
        raise PlanError(
            f"{caller}: the model is elastic already; call remove() of sw.elastic, and pass a new "
            "torchft.Manager"
        )
    return runtime
