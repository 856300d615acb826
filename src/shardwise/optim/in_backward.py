"""An optimizer that steps during backward, so that few units have gradients at the same time.

An optimizer skips parameters without gradients. While only one unit has gradients, a step of the
user's optimizer therefore updates that unit alone. The optimizer's groups, states and learning
rate schedulers work as usual.
"""

import contextlib
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.communicator import Communicator
from shardwise.errors import PlanError, StepError
from shardwise.features.checks import check_complete
from shardwise.features.device_step import DeviceSteps, prefetch_states
from shardwise.features.unit_steps import one_step_at_a_time
from shardwise.features.unused import (
    Unused,
    UnusedParameters,
    UsedParameterSync,
    check_all_used,
    gradients_of,
    settle,
    used_of,
)
from shardwise.runtime.attach import parameters_of, take_sharded
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.observer import Backward, StepObserver
from shardwise.runtime.parameters import STEPS_IN_BACKWARD, FSDPParameter
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.unit import Unit
from shardwise.tensor.sharding import sharding_of

__all__ = ["StepsInBackward", "optimizer_in_backward"]

_WAY_OUT = "call optimizer.step() after backward instead of using sw.optimizer_in_backward"


def optimizer_in_backward(model: nn.Module, optimizer: Optimizer) -> "StepsInBackward":
    """Let ``optimizer`` step each unit of ``model`` during backward, and free its gradients.

    A unit is stepped when its gradients are reduced and the rest of backward does not need its
    parameters. A rank then holds gradient shards of the units that are being reduced, three at
    most, instead of those of the whole model::

        sw.optimizer_in_backward(model, optimizer)
        for batch in batches:
            model(batch).mean().backward()      # steps
            optimizer.step()                    # does nothing: there are no gradients left
            optimizer.zero_grad()               # likewise
            lr_scheduler.step()

    The results are those of ``optimizer.step()`` after backward. Groups, states and learning rates
    of the optimizer remain yours. Its step hooks run once per unit. The differences are:

    - *Every backward that reduces gradients is a step.* To accumulate over several, call
      ``model.set_requires_gradient_sync(False)`` before the first and ``(True)`` before the last.
      A backward of a forward from before the step is refused.
    - *Operations that need all gradients at once do not work*: `sw.clip_grad_norm_` raises, and
      `torch.nn.utils.clip_grad_norm_` finds no gradients and clips nothing. Clip values, or each
      gradient separately, in ``parameter.register_post_accumulate_grad_hook``. With a GradScaler
      the steps would use scaled gradients, so the scaler's step raises: a `StepError` for fused
      optimizers, and torch's "No inf checks were recorded" for others. Train in bfloat16.
    - *An error leaves half a step*: some units were stepped before it. Inside
      ``sw.transaction(model, optimizer)`` the step is undone on every rank, but a transaction keeps
      a copy of parameters and states. ``unused="error"`` also raises after the parameters that all
      ranks used have been stepped.
    - *Parameters that the model does not shard*, such as trainable ``ignored_params``, keep their
      gradients until ``optimizer.step()`` after backward.
    - After a forward with gradients but without a backward (an evaluation without ``no_grad``), the
      next backward steps all units at its end, with the gradients of all of them in memory.
    - With ``unused="zeros"`` every backward through the model is a step, including those of
      `torch.autograd.grad`. Copies of the model step as usual.

    Args:
        model: the root of a sharded model. Every rank must call this.
        optimizer: an optimizer of exactly the model's parameters; frozen ones may be missing.

    Returns:
        A handle whose ``remove()`` ends this.

    Raises:
        PlanError: the model is not sharded or already has an optimizer in backward; the optimizer
            lacks a parameter, has one of another model, or needs a closure; a parameter has a
            gradient.
        StepError: called in a forward, a backward or `sw.gathered`.

    Source: Lv et al., LOMO, 2023 (arXiv 2306.09782), for the fused update.
    """
    runtime = runtime_of_root(model)
    scheduler = runtime.scheduler
    if any(unit.settings.across_replicas is not None for unit in runtime.units):
        raise PlanError(
            "replicas of sw.elastic decide whether a step counts before the optimizer runs; step "
            "after backward"
        )
    if scheduler.sequencer.steps_in_backward:
        raise PlanError("the model has an optimizer in backward; call remove() of its handle first")
    scheduler.check_idle("when the optimizer steps cannot change in the middle of a step")
    _check_optimizer(optimizer)
    take_sharded(optimizer)
    _check_parameters(model, optimizer)
    return StepsInBackward(scheduler, model, optimizer)


class StepsInBackward:
    """The handle that `optimizer_in_backward` returns."""

    def __init__(self, scheduler: Scheduler, model: nn.Module, optimizer: Optimizer) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._model = weakref.ref(model)
        self._previous = scheduler.observer
        assert isinstance(self._previous, UnusedParameters)
        scheduler.set_observer(_Stepper(optimizer, self._previous.mode, self._previous.device))
        scheduler.forbids_conversion["optimizer in backward"] = (
            "while sw.optimizer_in_backward steps its parameters; call remove() of its handle "
            "first, and sw.optimizer_in_backward again afterwards"
        )
        self._hook = optimizer.register_step_pre_hook(_refuse_scaled_gradients)
        self._mark(steps=True)

    def remove(self) -> None:
        """Step the optimizer after backward again.

        Raises:
            StepError: called in a forward or backward.
        """
        scheduler = self._scheduler()
        if scheduler is not None:
            scheduler.set_observer(self._previous)
            del scheduler.forbids_conversion["optimizer in backward"]
            self._mark(steps=False)
        self._scheduler = lambda: None  # type: ignore[assignment]
        self._hook.remove()

    def _mark(self, *, steps: bool) -> None:
        model = self._model()
        for parameter in () if model is None else model.parameters():
            if sharding_of(parameter) is not None:
                setattr(parameter, STEPS_IN_BACKWARD, steps)


class _Stepper(StepObserver):
    """Steps the units of one model during backward, and frees their gradients."""

    steps_in_backward = True

    def __init__(self, optimizer: Optimizer, unused: Unused, device: torch.device) -> None:
        self._optimizer = optimizer
        self._known = set(map(id, parameters_of(optimizer)))
        self._unused = unused
        self._device = device
        self._stepped: set[Unit] = set()  # units that stepped in the current backward
        # One sync per reduction: only the last one counts, but the device uses the memory of all.
        self._syncs: defaultdict[Unit, list[UsedParameterSync]] = defaultdict(list)
        self._used: dict[Unit, list[bool]] = {}  # parameters this rank used in this backward
        self._on_device: set[DeviceSteps] = set()  # copy units to the device in this backward

    def before_reduce(self, unit: Unit) -> None:
        """Raise a StepError if ``unit`` has already stepped in this backward.

        Begin to copy its states to the device, if they are on the host and the step is not.
        """
        if unit in self._stepped:
            raise StepError(
                f"{unit.plan.label}: gradients came after sw.optimizer_in_backward had stepped "
                "this unit, because backward recomputed a forward whose use of it had not been "
                "recorded. Run checkpointed units inside the forward of the model, or call "
                "optimizer.step() after backward"
            )
        steps = prefetch_states(self._optimizer, unit)
        if steps is not None:
            self._on_device.add(steps)

    def after_reduce(self, unit: Unit, comm: Communicator) -> None:
        """Start the exchange of used parameters right after the reduction of ``unit``."""
        if self._unused != "zeros":
            self._used[unit] = used_of(unit.gradients)
            label = f"agree on unused parameters of {unit.plan.label}"
            self._syncs[unit].append(UsedParameterSync([unit], comm, self._device, label))

    def step(self, unit: Unit, comm: Communicator) -> None:
        """Step ``unit`` and free its gradients."""
        if self._unused == "zeros":
            settle(unit.gradients, repeat(True))
        else:
            self._syncs[unit][-1].settle(comm)
            del self._syncs[unit]  # only now: if the wait raises, they are still in flight
        self._update(unit)

    def step_end(self, backward: Backward) -> None:
        """At the end of backward, step units that did not run, or raise, as ``unused`` says."""
        units = backward.complete
        late = [unit for unit in units if unit not in self._stepped]
        used, self._used = self._used, {}
        if self._unused == "error":
            self._stepped.clear()
            used_here = [u for unit in units for u in used.get(unit, used_of(unit.gradients))]
            check_all_used(gradients_of(units), used_here, backward, self._device)
        for unit in late if self._unused == "zeros" else ():
            for gradients in unit.gradients:
                gradients.fill_with_zeros()
                gradients.forget()
            self._update(unit)  # one at a time: the optimizer steps everything with a gradient
        self._finish_on_device()
        self._stepped.clear()

    def failed(self) -> list[object]:
        in_flight: list[object] = [
            sync.abandon() for syncs in self._syncs.values() for sync in syncs
        ]
        for state in (self._stepped, self._syncs, self._used):
            state.clear()
        self._finish_on_device()
        return in_flight

    def _finish_on_device(self) -> None:
        while self._on_device:
            self._on_device.pop().finish()

    def _update(self, unit: Unit) -> None:
        with_gradients = [p for p in unit.parameters if p.sharded.grad is not None]
        try:
            if with_gradients:
                self._stepped.add(unit)
                self._check_known(with_gradients)
                with self._without_others(unit), one_step_at_a_time(self._optimizer, _WAY_OUT):
                    self._optimizer.step()
        finally:
            for gradients in unit.gradients:
                gradients.drop()

    def _check_known(self, parameters: Sequence[FSDPParameter]) -> None:
        """Raise a StepError if the optimizer lacks one of ``parameters``."""
        if any(id(p.sharded) not in self._known for p in parameters):  # a group may have been added
            self._known = set(map(id, parameters_of(self._optimizer)))
        for p in parameters:
            if id(p.sharded) not in self._known:
                raise StepError(
                    f"{p.name} has a gradient and is not in the optimizer that steps in backward; "
                    "add it with optimizer.add_param_group, or freeze it with requires_grad_(False)"
                )

    @contextlib.contextmanager
    def _without_others(self, unit: Unit) -> Iterator[None]:
        """Hide the gradients of parameters outside ``unit``.

        Other units wait for more of them or for a reduction. Parameters that the engine does not
        manage wait for the user's ``optimizer.step()``.
        """
        own = {id(p.sharded) for p in unit.parameters}
        others = [p for p in parameters_of(self._optimizer) if id(p) not in own]
        kept = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient


def _check_optimizer(optimizer: object) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer_in_backward takes a torch.optim.Optimizer, got {name}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{name} needs a closure that evaluates the model again, which is impossible in "
            "backward; call optimizer.step(closure) as usual"
        )


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    check_complete(
        optimizer,
        model,
        "its gradients would never be used; give the optimizer all parameters of the sharded "
        "model, or freeze it with requires_grad_(False)",
    )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise PlanError(f"{name} has a gradient already; call optimizer.zero_grad() first")
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise PlanError(
                    f"param_groups[{number}]['params'][{position}] of shape "
                    f"{tuple(parameter.shape)} is not a parameter of the model, so no backward of "
                    "the model would step it; use a separate optimizer for it"
                )


def _refuse_scaled_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise a StepError if a GradScaler has left its scale for the optimizer to apply."""
    entries = vars(optimizer)
    if "found_inf" in entries:
        for name in ("found_inf", "grad_scale"):
            entries.pop(name, None)
        raise StepError(
            "a GradScaler must see all gradients before the optimizer steps, but "
            "sw.optimizer_in_backward steps during backward, so this step used scaled gradients; "
            "train in bfloat16 without a scaler, or call remove() of the handle"
        )
