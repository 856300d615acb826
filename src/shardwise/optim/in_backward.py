"""An optimizer that steps during backward, so that gradients of few units are alive at a time."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import PlanError, StepError
from shardwise.features.step_in_backward import Stepper
from shardwise.features.unused import UnusedParameters
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.parameters import STEPS_IN_BACKWARD, FSDPParameter
from shardwise.runtime.scheduler import Scheduler
from shardwise.tensor.sharding import sharding_of

__all__ = ["StepsInBackward", "optimizer_in_backward"]


def optimizer_in_backward(model: nn.Module, optimizer: Optimizer) -> "StepsInBackward":
    """From now on ``optimizer`` steps each unit of ``model`` in backward, and frees its gradients.

    A unit is stepped when its reduced gradients are there and nothing of the backward needs its
    parameters any more. So a rank holds the gradient shards of the units that are being reduced,
    at most three, and not those of the whole model::

        sw.optimizer_in_backward(model, optimizer)
        for batch in batches:
            model(batch).mean().backward()      # steps
            optimizer.step()                    # does nothing: there are no gradients left
            optimizer.zero_grad()               # nor does this
            lr_scheduler.step()

    Numbers are those of ``optimizer.step()`` after backward. Its groups, states and learning rates
    stay the user's; hooks on its step run once for each unit. What differs:

    - *Every backward that reduces steps.* To accumulate gradients of several, call
      ``model.set_requires_gradient_sync(False)`` before the first and ``(True)`` before the last.
      A later backward of a forward from before the step is refused.
    - *Nothing that needs all gradients first*: `sw.clip_grad_norm_` is refused, and
      `torch.nn.utils.clip_grad_norm_` finds no gradients and clips nothing. Clip values, or each
      gradient by itself, in ``parameter.register_post_accumulate_grad_hook``. A GradScaler's
      losses would be stepped scaled: its step is refused, by a fused optimizer with a `StepError`
      and by others with torch's "No inf checks were recorded"; train in bfloat16.
    - *Errors leave half a step*, for units after the error were stepped before it, unless the step
      is inside ``sw.transaction(model, optimizer)``, which undoes it on every rank. That keeps a
      copy of parameters and states, though. It is the same with ``unused="error"``, which raises
      when the parameters that all ranks used are stepped.
    - A forward with gradients that no backward follows (an evaluation without ``no_grad``) makes
      the next backward step at its end, with the gradients of all units alive.
    - With ``unused="zeros"`` every backward through the model counts as a step, that of
      `torch.autograd.grad` included. Copies of the model step as usual.

    Args:
        model: the root, sharded. Every rank has to call this.
        optimizer: of exactly the model's parameters; frozen ones may be missing.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        PlanError: the model is not sharded or has an optimizer in backward; the optimizer lacks a
            parameter, has one that is not the model's, or needs a closure; a gradient is there.
        StepError: in a forward, a backward or `sw.gathered`.

    Source: Lv et al., LOMO, 2023 (arXiv 2306.09782), for the fused update.
    """
    scheduler = runtime_of_root(model).scheduler
    if scheduler.steps_in_backward:
        raise PlanError("the model has an optimizer in backward; call remove() of its handle first")
    scheduler.check_idle("when the optimizer steps cannot change in the middle of a step")
    _check_optimizer(optimizer)
    _check_parameters(model, optimizer)
    return StepsInBackward(scheduler, model, optimizer)


class StepsInBackward:
    """What `optimizer_in_backward` began."""

    def __init__(self, scheduler: Scheduler, model: nn.Module, optimizer: Optimizer) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._parameters: list[weakref.ref[Tensor]] = [weakref.ref(p) for p in model.parameters()]
        self._previous = scheduler.observer
        assert isinstance(self._previous, UnusedParameters)
        mode, device = self._previous.mode, self._previous.device
        scheduler.observe_with(Stepper(_UnitStep(optimizer), mode, device))
        self._hook = optimizer.register_step_pre_hook(_refuse_scaled_gradients)
        self._mark(steps=True)

    def remove(self) -> None:
        """Let the user step the optimizer after backward again.

        Raises:
            StepError: a forward or backward is under way.
        """
        scheduler = self._scheduler()
        if scheduler is not None:
            scheduler.observe_with(self._previous)
            self._mark(steps=False)
        self._scheduler = lambda: None  # type: ignore[assignment]
        self._hook.remove()

    def _mark(self, *, steps: bool) -> None:
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and sharding_of(parameter) is not None:
                setattr(parameter, STEPS_IN_BACKWARD, steps)


class _UnitStep:
    """A step of ``optimizer`` in which only some parameters have gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known = _ids_in(optimizer)

    def __call__(self, parameters: Sequence[FSDPParameter]) -> None:
        self._check_known(parameters)
        before = _values(self._optimizer)
        self._optimizer.step()
        after = _values(self._optimizer)
        changed = {
            key
            for old, new in zip(before, after, strict=True)
            for key in new
            if key not in old or not _is_same(old[key], new[key])
        }
        if changed:
            raise StepError(
                f"{type(self._optimizer).__name__} changed {', '.join(sorted(changed))} of its "
                "param_groups in a step of one unit, so it would count units for steps; call "
                "optimizer.step() after backward instead of sw.optimizer_in_backward"
            )

    def _check_known(self, parameters: Sequence[FSDPParameter]) -> None:
        if all(id(p.sharded) in self._known for p in parameters):
            return
        self._known = _ids_in(self._optimizer)  # it may have got more groups
        for p in parameters:
            if id(p.sharded) not in self._known:
                raise StepError(
                    f"{p.name} has a gradient and is not in the optimizer that steps in backward; "
                    "add it with optimizer.add_param_group, or freeze it with requires_grad_(False)"
                )


def _check_optimizer(optimizer: object) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer_in_backward takes a torch.optim.Optimizer, got {name}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{name} evaluates the model again within its step (it needs a closure), which cannot "
            "be done in backward; call optimizer.step(closure) as usual"
        )


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    known = _ids_in(optimizer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise PlanError(
                f"{name} is not in the optimizer, so its gradients would never be used; give the "
                "optimizer all parameters of the sharded model, or freeze it with "
                "requires_grad_(False)"
            )
        if parameter.grad is not None:
            raise PlanError(f"{name} has a gradient already; call optimizer.zero_grad() first")
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise PlanError(
                    f"param_groups[{number}]['params'][{position}] of shape "
                    f"{tuple(parameter.shape)} is not a parameter of the model, and no backward "
                    "of the model would step it; give it an optimizer of its own"
                )


def _refuse_scaled_gradients(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """What a GradScaler leaves on an optimizer that unscales by itself."""
    entries = vars(optimizer)
    if "found_inf" in entries:
        for name in ("found_inf", "grad_scale"):
            entries.pop(name, None)
        raise StepError(
            "a GradScaler has to see all gradients before the optimizer steps, which "
            "sw.optimizer_in_backward does in backward, so this step was made with scaled ones; "
            "train in bfloat16 without a scaler, or call remove() of the handle"
        )


def _ids_in(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _is_same(old: object, new: object) -> bool:
    return old is new or (type(old) is type(new) and isinstance(new, (int, float)) and old == new)
