"""`join`: training and evaluation on ranks with unequal numbers of batches."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise import _private
from shardwise._private import pytree
from shardwise._warnings import warn_caller
from shardwise.errors import PlanError, StepError
from shardwise.features.agreement import Action
from shardwise.features.checks import iterates_in_forward
from shardwise.features.joined_ranks import JOINED, Agreement, JoinedRanks
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.nonfinite import describe_nonfinite
from shardwise.runtime.attach import parameters_of, take_sharded
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import runtime_of_root, set_managed, shard_again_if_outdated
from shardwise.runtime.parameters import STEPS_IN_BACKWARD

__all__ = ["join"]


@contextlib.contextmanager
def join(
    model: nn.Module, *stepped: Optimizer | LRScheduler, training: bool = True
) -> Iterator[None]:
    """Run a loop in which ranks may have different numbers of batches. All ranks must enter.

    ::

        with sw.join(model, optimizer, scheduler):
            for batch in batches:  # those of this rank: any number of them, or none
                model(batch).mean().backward()
                sw.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    A rank that leaves the loop waits at the end of the block until all ranks have left it. Until
    then it takes part in the gathers and reductions of the others without computing, with zeros for
    gradients, and steps its shards. Gradients are the mean over the ranks that have computed in the
    step; with `sw.backward`, over the tokens.

    In a step of several micro-batches their numbers may differ, too. The ranks that have computed
    in any of them count for the mean. Call ``model.set_requires_gradient_sync(True)`` before the
    last micro-batch of a step and False before the others, or use `sw.backward`: a rank waits
    before its last micro-batch until the last one of all others.

    Each outermost forward begins with one all-reduce of a few numbers. While a rank has nothing
    left to compute, so do backwards, clipping and steps of optimizers. The host waits for them.

    Args:
        model: a model sharded by `fully_shard`.
        stepped: all optimizers and learning rate schedulers that step in the block.
        training: False for a loop of forwards alone, as in an evaluation or ``generate``.

    Raises:
        PlanError: the model is not sharded; it cannot be joined (experts with other ranks,
            communication hooks, elastic replicas); an argument is not an optimizer or a scheduler,
            or is a scheduler whose steps depend on a metric, or an optimizer with parameters that
            are not of the model or in its ``ignored_params``.
        StepError: the ranks run different programs; an optimizer steps that is not in ``stepped``;
            in a forward, a backward, `gathered`, or another `join` of the model.
        PeerAborted: another rank raised in the block.
    """
    shard_again_if_outdated(model)
    runtime = runtime_of_root(model)
    _check(runtime, stepped, training=training)
    scheduler = runtime.scheduler
    scheduler.check_idle("sw.join cannot begin in a forward, a backward or sw.gathered")
    parameters = list(model.parameters())
    _check_parameters(model, runtime, stepped)
    iterating = (name for name, one in model.named_modules() if iterates_in_forward(one))
    ranks = JoinedRanks(runtime, parameters, training=training, iterating=next(iterating, None))
    steps = _Steps(ranks, stepped, parameters)
    hooks = contextlib.ExitStack()
    try:
        ranks.open()
        hooks.callback(register_optimizer_step_pre_hook(steps.before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(steps.after_step).remove)
        for parameter in parameters:
            setattr(parameter, JOINED, ranks)
        scheduler.call_observer = ranks
        scheduler.forbids_conversion["join"] = (
            "inside sw.join, where ranks without batches would not follow; do it before"
        )
        if not training:
            # transformers need not keep ranks together
            _private.set_managed(model, is_managed=False)
        yield
        ranks.leave()
        steps.share_options(priority=ranks.last_step)
    except BaseException as error:
        ranks.abandon(error)
        raise
    finally:
        scheduler.call_observer = None
        scheduler.forbids_conversion.pop("join", None)
        ranks.close()
        hooks.close()
        set_managed(model)
        for parameter in parameters:
            vars(parameter).pop(JOINED, None)


class _Steps:
    """The optimizers and schedulers that all ranks step."""

    def __init__(
        self,
        ranks: JoinedRanks,
        stepped: Sequence[Optimizer | LRScheduler],
        parameters: Sequence[Tensor],
    ) -> None:
        self._ranks = ranks
        self._optimizers = [one for one in stepped if isinstance(one, Optimizer)]
        self._schedulers = [one for one in stepped if isinstance(one, LRScheduler)]
        self._parameters = {id(parameter) for parameter in parameters}
        self._has_warned = False  # about a scheduler that may be missing
        self._stepping_since = -1  # the number of exchanges at the last step that has not ended
        ranks.shadows = {Action.STEP: self._step, Action.CLIP: self._clip}
        ranks.options, ranks.take_options = self._options, self._take_options

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Is called before every step of any optimizer of this process."""
        number = next((n for n, one in enumerate(self._optimizers) if one is optimizer), -1)
        if number < 0:
            self._refuse(optimizer)
            return
        if _steps_in_backward(optimizer):
            return
        if self._stepping_since == self._ranks.num_exchanges:
            return  # this step has called that of its base class
        if kwargs.get("closure") is not None or any(map(callable, args[1:])):
            raise StepError("a closure inside sw.join: ranks without batches could not run it")
        if not (self._ranks.is_shadow or self._ranks.all_compute):
            self._ranks.check_unchanged(parameters_of(optimizer))
            agreed = self._ranks.announce(Action.STEP, number, shared=self._options())
            self._take_options(agreed.shared)
        self._ranks.refuse_others(refuses=False)
        self._stepping_since = self._ranks.num_exchanges
        self._ranks.note_step(parameters_of(optimizer))

    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Is called after every step of any optimizer of this process."""
        self._ranks.forget_complete(parameters_of(optimizer))
        self._stepping_since = -1
        self._ranks.refuse_others()

    def share_options(self, *, priority: float) -> None:
        """Take over the schedules and options of the first rank with the highest priority."""
        self._take_options(self._ranks.share(self._options(), priority))

    def _options(self) -> list[float]:
        """The schedules and options of this rank."""
        epochs = [float(one.last_epoch) for one in self._schedulers]
        groups = [group for one in self._optimizers for group in one.param_groups]
        values = [group[key] for group in groups for key in group if key != "params"]
        parts = pytree.tree_leaves(values, is_leaf=_is_dict)
        return epochs + [float(part) for part in parts if _is_number(part)]

    def _take_options(self, options: Sequence[float]) -> None:
        found = iter(options)
        for scheduler in self._schedulers:
            last_epoch = next(found)
            while scheduler.last_epoch < last_epoch:
                scheduler.step()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self._take_over(optimizer, group, found)

    def _take_over(
        self, optimizer: Optimizer, group: dict[str, Any], numbers: Iterator[float]
    ) -> None:
        def filled(value: Any) -> Any:
            if not _is_number(value):
                return value
            number = next(numbers)
            return value.fill_(number) if isinstance(value, Tensor) else type(value)(number)

        before = float(group["lr"]) if "lr" in group else 0.0
        for key in [key for key in group if key != "params"]:
            group[key] = pytree.tree_map(filled, group[key], is_leaf=_is_dict)
        is_scheduled = any(one.optimizer is optimizer for one in self._schedulers)
        is_changed = "initial_lr" in group and before != float(group["lr"])
        if is_changed and not is_scheduled and not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"the learning rate of {type(optimizer).__name__} changes inside sw.join: if a "
                "scheduler does that, pass it, as in sw.join(model, optimizer, scheduler), or it "
                "stays behind on ranks without batches"
            )

    def _refuse(self, optimizer: Optimizer) -> None:
        is_known = any(id(one) in self._parameters for one in parameters_of(optimizer))
        if is_known and not _steps_in_backward(optimizer):
            raise StepError(
                f"{type(optimizer).__name__} steps inside sw.join, which does not know it, so it "
                "would not step on ranks without batches; pass it, as in sw.join(model, optimizer)"
            )

    def _step(self, agreed: Agreement) -> None:
        """Step an optimizer with the reduced gradients, as the ranks that compute do."""
        self._take_options(agreed.shared)
        self._optimizers[agreed.value].step()

    def _clip(self, agreed: Agreement) -> None:
        parameters, max_norm, order, checks = self._ranks.clipped(agreed)
        norm = clip_grad_norm_(parameters, max_norm, order)
        if checks and not norm.isfinite():
            describe_nonfinite(parameters)  # the others raise an error with this


def _check(runtime: Runtime, stepped: Sequence[object], *, training: bool) -> None:
    """Raise an error if the model cannot be joined, or ``stepped`` is not valid."""
    for one in stepped:
        name = type(one).__name__
        if not training:
            raise PlanError(f"sw.join(training=False) steps nothing; leave out the {name}")
        counts = hasattr(one, "last_epoch") and not isinstance(one, ReduceLROnPlateau)
        if isinstance(one, ChainedScheduler):
            raise PlanError("sw.join: pass the schedulers in the ChainedScheduler instead of it")
        if not (isinstance(one, Optimizer) or counts):
            raise PlanError(
                "sw.join: expected optimizers and learning rate schedulers that count steps, got "
                f"{name}; step it after the block"
            )
    scheduler = runtime.scheduler
    if scheduler.call_observer is not None:
        raise StepError("the model is in another sw.join already")
    settings = [unit.settings for unit in runtime.units]
    if training and runtime.own_meshes:
        raise PlanError("sw.join: units with other ranks than the model (experts) cannot be joined")
    if training and runtime.mesh.leaves is not None:
        raise PlanError(
            "sw.join: a step of a reproducible model has as many micro-batches on every rank; give "
            "all ranks as many, or leave out reproducible=... of fully_shard"
        )
    if any(one.collective_hook is not None for one in settings):
        raise PlanError("sw.join: a communication hook divides by the number of all ranks")
    if any(one.across_replicas is not None for one in settings):
        raise PlanError("sw.join: replicas of sw.elastic cannot be joined")


def _check_parameters(
    model: nn.Module, runtime: Runtime, stepped: Sequence[Optimizer | LRScheduler]
) -> None:
    """Raise a PlanError if an optimizer steps parameters that the engine does not manage."""
    managed = {id(one.sharded) for unit in runtime.units for one in unit.parameters}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in (one for one in stepped if isinstance(one, Optimizer)):
        take_sharded(optimizer)
        for other in parameters_of(optimizer):
            if other.requires_grad and id(other) not in managed:
                name = names.get(id(other), f"a parameter of shape {tuple(other.shape)}")
                raise PlanError(
                    f"sw.join: {type(optimizer).__name__} steps {name}, which fully_shard does not "
                    "manage, so it would differ on ranks without batches; make it part of the "
                    "model, and not one of ignored_params"
                )


def _steps_in_backward(optimizer: Optimizer) -> bool:
    return any(getattr(one, STEPS_IN_BACKWARD, False) for one in parameters_of(optimizer))


def _is_dict(value: object) -> bool:
    """Whether a part of an option is not looked into, since it may be shared with others."""
    return isinstance(value, dict)


def _is_number(value: object) -> bool:
    """Whether a part of an option of an optimizer is a number, as a learning rate is."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
